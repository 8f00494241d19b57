"""What a checker returns: numbers, and violations by name."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken promise at one resource."""

    check: str
    """Stable name, e.g. "P1.two_owners"."""
    resource: str
    text: str
    """What was seen and what was expected, without payloads."""


@dataclass(slots=True)
class Finding:
    """The outcome of one checker."""

    numbers: dict[str, int] = field(default_factory=dict)
    """Counts by name, those of the summary among them."""
    violations: list[Violation] = field(default_factory=list)

    def add(self, check: str, resource: str, text: str) -> None:
        """Records a violation."""
        self.violations.append(Violation(check, resource, text))

    def count(self, name: str, by: int = 1) -> None:
        """Raises a count."""
        self.numbers[name] = self.numbers.get(name, 0) + by

    def merge(self, other: "Finding") -> None:
        """Takes over another finding's numbers and violations; names of numbers are distinct between checkers."""
        overlap = self.numbers.keys() & other.numbers.keys()
        assert not overlap, f"two checkers count {overlap}"
        self.numbers |= other.numbers
        self.violations += other.violations
