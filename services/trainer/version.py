"""Weight versions as the trainer counts them."""

from dataclasses import dataclass

from services.common import wire

LINEAGE_SHIFT = 32


@dataclass(frozen=True, slots=True, order=True)
class Version:
    """(lineage, number) of the weights in memory; ordered."""

    lineage: int
    number: int

    def counter(self) -> int:
        """As torchft counts steps: +1 per committed step, a newer lineage above all older ones."""
        return (self.lineage << LINEAGE_SHIFT) + self.number

    @classmethod
    def of_counter(cls, counter: int) -> "Version":
        """The reverse of `counter`."""
        return cls(counter >> LINEAGE_SHIFT, counter & ((1 << LINEAGE_SHIFT) - 1))

    @classmethod
    def of(cls, ref: wire.VersionRef) -> "Version":
        """From the wire; lineage 0 is read as the first."""
        return cls(ref.lineage or 1, ref.number)

    def next(self) -> "Version":
        """The version that a step from this one makes."""
        return Version(self.lineage, self.number + 1)

    def before(self) -> "Version":
        """The version that this one's step began from; number 0 stays."""
        return Version(self.lineage, max(0, self.number - 1))

    def ref(self, policy: str) -> wire.VersionRef:
        """For the wire."""
        return wire.VersionRef(policy=policy, lineage=self.lineage, number=self.number)

    def __str__(self) -> str:
        return f"{self.lineage}-{self.number}"
