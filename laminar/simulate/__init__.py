"""A discrete-event simulator of a run, and of other systems' runs, that decides by our own policies."""
