"""The config: models, loading, checks, explanation."""
