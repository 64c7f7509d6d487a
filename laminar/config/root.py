"""The whole config as one value."""

from pydantic import Field

from laminar.config.rollout import RolloutConfig
from laminar.config.section import Section
from laminar.config.simulate import SimulateConfig
from laminar.config.system import (
    AlertsConfig,
    CheckpointConfig,
    ClusterConfig,
    DashboardConfig,
    DataConfig,
    EnvironmentConfig,
    EvalConfig,
    ExperienceConfig,
    MetricsConfig,
    ModelConfig,
    RelayConfig,
    RewardConfig,
    RunConfig,
    StalenessConfig,
)
from laminar.config.trainer import TrainerConfig


class LaminarConfig(Section):
    """A run's settings, checked."""

    run: RunConfig = RunConfig()
    model: ModelConfig
    data: DataConfig
    environment: EnvironmentConfig = EnvironmentConfig()
    rewards: list[RewardConfig] = Field(default_factory=list)
    rollout: RolloutConfig = RolloutConfig()
    experience: ExperienceConfig = ExperienceConfig()
    staleness: StalenessConfig = StalenessConfig()
    trainer: TrainerConfig = TrainerConfig()
    relay: RelayConfig = RelayConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
    metrics: MetricsConfig = MetricsConfig()
    alerts: AlertsConfig = AlertsConfig()
    dashboard: DashboardConfig = DashboardConfig()
    cluster: ClusterConfig = ClusterConfig()
    simulate: SimulateConfig = SimulateConfig()
