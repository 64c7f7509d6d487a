"""From `[environment]` to a maker of environments, one for each episode."""

import inspect
from collections.abc import Callable

from laminar.config.system import EnvironmentConfig
from laminar.errors import ConfigError
from laminar.plugins import resolve, validate_options
from rollout.environments import ENVIRONMENTS
from rollout.environments.base import Environment

EnvironmentFactory = Callable[[], Environment]


def is_resumable(config: EnvironmentConfig) -> bool:
    """Whether another worker may go on with an episode (`Environment.resumable`)."""
    return bool(getattr(resolve(config.kind, ENVIRONMENTS, "environment.kind"), "resumable", False))


def build_environment_factory(config: EnvironmentConfig) -> EnvironmentFactory:
    """The maker of the environments that the config asks for.

    Raises:
        ConfigError: an unknown kind, wrong options, or a class that lacks a method.
    """
    attribute = resolve(config.kind, ENVIRONMENTS, "environment.kind")
    options = validate_options(attribute, config.options, "environment.options")
    if not callable(attribute):
        raise ConfigError(f"environment.kind: {config.kind!r} is {attribute!r:.80}, not a class")
    missing = [name for name in ("reset", "step", "close") if inspect.isclass(attribute) and not hasattr(attribute, name)]
    if missing:
        raise ConfigError(
            f"environment.kind: class {config.kind!r} has no {' and no '.join(missing)}; see rollout/README.md"
        )
    return attribute if options is None else lambda: attribute(options)
