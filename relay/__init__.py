"""Weight versions: complete, verified, in the shared memory of every machine that reads them."""
