"""Where metrics go besides the run folder's own files."""
