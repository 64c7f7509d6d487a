"""The exception tree. Every message states the value that is wrong and the remedy, in one sentence.

LaminarError
├── ConfigError            a setting, a file or a data row that the user can mend (exit code 2)
├── EnvironmentSetupError  the machine lacks something: memory, a port, Redis, a program (exit code 3)
├── RunFailedError         a started run gave up, with the reason (exit code 4)
├── RunNotAliveError       a run that should be alive is not, or does not answer (exit code 5)
├── InvariantError         a rule of the design was broken: a bug of ours, never caught
├── DeadlineError          a named wait ran out of time
├── ExperienceError        the data module refused a request
├── EngineError            an engine answered wrongly, or not at all
└── RelayError             a weight version could not be published, verified or leased
"""


class LaminarError(Exception):
    """Base of all errors raised on purpose; the command line prints it as one sentence."""

    exit_code = 1


class ConfigError(LaminarError):
    """A setting, file or data row that the user can mend."""

    exit_code = 2


class EnvironmentSetupError(LaminarError):
    """The machine lacks something that the run needs."""

    exit_code = 3


class RunFailedError(LaminarError):
    """A started run gave up."""

    exit_code = 4


class RunNotAliveError(LaminarError):
    """A run that should be alive is not, or does not answer."""

    exit_code = 5


class InvariantError(LaminarError):
    """A rule of the design was broken."""


class DeadlineError(LaminarError):
    """A named wait ran out of time.

    Args:
        waited_for: what was waited for, by name.
        seconds: how long.
    """

    def __init__(self, waited_for: str, seconds: float) -> None:
        super().__init__(f"waited {seconds:.1f} s for {waited_for}, in vain")
        self.waited_for = waited_for
        self.seconds = seconds

    def __reduce__(self) -> tuple[type["DeadlineError"], tuple[str, float]]:
        return type(self), (self.waited_for, self.seconds)  # it crosses process boundaries


class ExperienceError(LaminarError):
    """The data module refused a request."""


class EngineError(LaminarError):
    """An engine answered wrongly, or not at all."""


class RelayError(LaminarError):
    """A weight version could not be published, verified or leased."""


FATAL_ERRORS = (ConfigError, EnvironmentSetupError, RunFailedError)
"""Errors that no restart of a role can mend."""


def reason(error: BaseException) -> str:
    """What an error says. One that says nothing is named by its kind, and so is a `KeyError`, which says its key only."""
    text = str(error).strip()
    if text and isinstance(error, KeyError):
        return f"{type(error).__name__}: {text}"
    return text or type(error).__name__


def first_line(error: BaseException) -> str:
    """The first line of an error's reason."""
    return reason(error).splitlines()[0]


def first_error(failures: BaseExceptionGroup[LaminarError]) -> LaminarError:
    """The first leaf of a group of errors, however nested; a fatal one before others."""
    leaves: list[LaminarError] = []

    def collect(error: BaseException) -> None:
        if isinstance(error, BaseExceptionGroup):
            for inner in error.exceptions:
                collect(inner)
        elif isinstance(error, LaminarError):
            leaves.append(error)

    collect(failures)
    return next((leaf for leaf in leaves if isinstance(leaf, FATAL_ERRORS)), leaves[0])
