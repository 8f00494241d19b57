"""What `libra simulate --preset NAME` does: a name, and a function that answers with a document and tables of it."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from services.simulator import anchors
from services.simulator.anchors import Anchor


@dataclass(frozen=True, slots=True)
class Table:
    """For people."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[object, ...], ...]


@dataclass(frozen=True, slots=True)
class Shown:
    """One answer: the JSON document, and the same as tables."""

    document: dict[str, Any]
    tables: tuple[Table, ...]


def anchors_preset() -> Shown:
    """Published times and ratios, given and got."""
    found = anchors.collect()
    rows = [{key: value for key, value in asdict(a).items() if key != "group"} for a in found]
    return Shown({"anchors": rows}, (_summary(found), _figures(found)))


PRESETS: dict[str, Callable[[], Shown]] = {"anchors": anchors_preset}


def _summary(found: Sequence[Anchor]) -> Table:
    """Errors of the rows that were fitted and held, by group."""
    rows: list[tuple[object, ...]] = []
    for group in dict.fromkeys(a.group for a in found if a.split != "published"):
        for split in ("fit", "held"):
            errors = sorted(a.error for a in found if a.group == group and a.split == split)
            if errors:
                rows.append((group, split, len(errors), anchors.median_error(found, split, group), errors[-1]))
    held = [a.error for a in found if a.split == "held"]
    rows.append(("all", "held", len(held), anchors.median_error(found, "held"), max(held)))
    return Table("Errors", ("group", "split", "rows", "median", "largest"), tuple(rows))


def _figures(found: Sequence[Anchor]) -> Table:
    """Every anchor but the rows of step times, of which there are hundreds."""
    shown = [a for a in found if not a.group.endswith((" decode", " prefill"))]
    rows = tuple((a.name, a.split, float(a.given), float(a.got), a.error, a.note) for a in shown)
    return Table("Anchors", ("name", "split", "given", "got", "error", "note"), rows)
