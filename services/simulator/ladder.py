"""Published ratios between policies, beside those of a comparison on the same cluster and kind of workload."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Rung:
    """Tokens per second of one policy over another's, as published."""

    name: str
    given: float
    over: str
    under: str
    source: str


PAPER = "Libra (arXiv 2606.03077), R2E-Gym on 48 x A800, as quoted in write-ups"
LADDER = (
    Rung("homogeneous planner over static uniform", 510 / 423, "best-homogeneous", "static-uniform", PAPER),
    Rung("heterogeneous TP over homogeneous planner", 551 / 510, "best-static", "best-homogeneous", PAPER),
    Rung("C-MLFQ over heterogeneous TP", 666 / 551, "published-cmlfq", "best-static", PAPER),
    Rung("all over static uniform", 763 / 423, "libra", "static-uniform", PAPER),
    Rung("all over colocated", 3.09, "libra", "colocated", PAPER),
    Rung("fully asynchronous over colocated", 2.35, "best-homogeneous", "colocated", "verl, fully async: 2.35 to 2.67"),
)


def rungs(policies: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows {name, given, got, source} of those whose two policies were compared. Nothing is fitted to them."""
    rates = {row["name"]: row["tokens_per_s"] for row in policies}
    return [
        {"name": r.name, "given": round(r.given, 2), "got": rates[r.over] / rates[r.under], "source": r.source}
        for r in LADDER
        if r.over in rates and r.under in rates
    ]
