"""The data module: prompts are claimed, trajectories submitted, batches taken, all through one Redis server.

Import the modules by name; `README.md` here has the states, the keys and the scripts.
"""
