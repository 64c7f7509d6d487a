"""What is counted "so far", over restarts and resumes: a counter that begins again does not make its curve fall (pure)."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Total:
    """A sum over roles of what each counts since its own start.

    Attributes:
        value: the sum over all lives of all roles.
    """

    value: float = 0.0
    _last: dict[str, float] = field(default_factory=dict)

    def report(self, role: str, count: float) -> float:
        """A role has counted so far; fewer than before means that it was started anew. Returns the sum."""
        last = self._last.get(role, 0.0)
        self.value += count - last if count >= last else count
        self._last[role] = count
        return self.value

    def remember(self, role: str, count: float) -> None:
        """A role had counted so far, and that is in the sum already."""
        self._last[role] = count
