"""Engines: servers that sample tokens, and the client and process that the worker uses them through."""
