"""Algorithms: one short file each, composed from pure functions. The tables name them without importing torch."""

ALGORITHMS = {"grpo": "trainer.algorithms.grpo:Grpo"}
"""Algorithm by `trainer.algorithm.kind`."""

ALGORITHM_OPTIONS = {"grpo": "trainer.algorithms.options:GrpoOptions"}
"""Torch-free options model by kind, for `laminar check`."""
