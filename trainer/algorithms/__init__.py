"""Algorithms, composed from pure functions. The tables name them without importing torch."""

_GENERAL = "trainer.algorithms.policy_gradient:PolicyGradient"

ALGORITHM_OPTIONS = {
    "grpo": "trainer.algorithms.presets:GrpoOptions",
    "dr_grpo": "trainer.algorithms.presets:DrGrpoOptions",
    "dapo": "trainer.algorithms.presets:DapoOptions",
    "rloo": "trainer.algorithms.presets:RlooOptions",
    "reinforce_plus_plus": "trainer.algorithms.presets:ReinforcePlusPlusOptions",
    "reinforce_plus_plus_baseline": "trainer.algorithms.presets:ReinforcePlusPlusBaselineOptions",
    "ppo": "trainer.algorithms.presets:PpoOptions",
    "gspo": "trainer.algorithms.presets:GspoOptions",
    "cispo": "trainer.algorithms.presets:CispoOptions",
    "decoupled_ppo": "trainer.algorithms.presets:DecoupledPpoOptions",
    "aipo": "trainer.algorithms.presets:AipoOptions",
    "remax": "trainer.algorithms.presets:RemaxOptions",
    "safe_rlhf": "trainer.algorithms.presets:SafeRlhfOptions",
}
"""Torch-free options model by `trainer.algorithm.kind`, for `laminar check`."""

ALGORITHMS = dict.fromkeys(ALGORITHM_OPTIONS, _GENERAL) | {"safe_rlhf": "trainer.algorithms.safe_rlhf:SafeRlhf"}
"""Algorithm by kind: presets of one, and one that learns a number beside the policy."""
