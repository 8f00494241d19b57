"""Policies by name, and the layouts that searches hand to those that do not choose one themselves."""

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from services.common.errors import ConfigError
from services.simulator.layout import Layout, Mode
from services.simulator.policies import search
from services.simulator.policies.base import Policy
from services.simulator.policies.clairvoyant import VARIANTS, Clairvoyant
from services.simulator.policies.feedback import FeedbackQueue
from services.simulator.policies.libra import Libra
from services.simulator.policies.predictor import LengthPredictor
from services.simulator.policies.priority import SiblingHistory, TrajectoryPriority
from services.simulator.policies.published import PublishedQueue
from services.simulator.policies.static import BestHomogeneous, BestStatic, StaticUniform, uniform
from services.simulator.policies.sticky import StickyHash
from services.simulator.policies.synchronous import Colocated, TailBatching
from services.simulator.processes import Run

Source = str
"""Where a policy's layout comes from: `homogeneous`, `mixed`, `colocated`, `foresight` (searches), `uniform`, or `own`:
it begins with what it likes, and may plan. Where nothing is trained no step tells it what to plan from, and `own` is
`mixed`: policies differ by what they do with trajectories.
"""


@dataclass(frozen=True, slots=True)
class Entry:
    """How a policy is made from a layout, and which one it gets."""

    make: Callable[..., Policy]
    """Called with a layout; with none where the source is `own`."""
    layout: Source
    variants: tuple[Callable[..., Policy], ...] = ()
    """Of a bound: each is run, and the best counts."""


POLICIES: Mapping[str, Entry] = {
    "libra": Entry(Libra, "own"),
    "best-static": Entry(BestStatic, "mixed"),
    "best-homogeneous": Entry(BestHomogeneous, "homogeneous"),
    "static-uniform": Entry(StaticUniform, "uniform"),
    "colocated": Entry(Colocated, "colocated"),
    "sticky-hash": Entry(StickyHash, "homogeneous"),
    "length-predictor": Entry(LengthPredictor, "homogeneous"),
    "published-cmlfq": Entry(PublishedQueue, "mixed"),
    "sibling-history": Entry(SiblingHistory, "homogeneous"),
    "trajectory-priority": Entry(TrajectoryPriority, "homogeneous"),
    "mlfq": Entry(FeedbackQueue, "mixed"),
    "tail-batching": Entry(TailBatching, "colocated"),
    "clairvoyant": Entry(Clairvoyant, "foresight", VARIANTS),
}
SYNCHRONOUS = ("colocated", "tail-batching")
LEAST_LOADED = ("static-uniform", "best-homogeneous", "best-static")
"""They differ in their layouts alone."""


def names(wanted: str | Iterable[str]) -> list[str]:
    """Policies by a comma-separated list, `all`, or a sequence. Raises ConfigError naming an unknown one."""
    chosen = [w.strip() for w in wanted.split(",")] if isinstance(wanted, str) else list(wanted)
    if chosen == ["all"]:
        return list(POLICIES)
    for name in chosen:
        if name not in POLICIES:
            near = difflib.get_close_matches(name, POLICIES, n=1, cutoff=0.4)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"policy {name!r}: expected all or one of {', '.join(POLICIES)}{hint}")
    return list(dict.fromkeys(chosen))


def without_training(chosen: Iterable[str]) -> tuple[list[str], tuple[str, ...]]:
    """Those of them that a run without training can have, and a note on the others, if any."""
    every = list(chosen)
    left_out = [name for name in every if name in SYNCHRONOUS]
    note = f"{', '.join(left_out)}: nothing is trained here, so synchronous policies are left out"
    return [name for name in every if name not in left_out], (note,) if left_out else ()


@dataclass(frozen=True, slots=True)
class Layouts:
    """Layouts by source, and what finding them cost: (source, layouts tried, steps simulated)."""

    by_source: Mapping[Source, Layout]
    cost: tuple[tuple[str, int, int], ...] = ()


def layouts(chosen: Iterable[str], question: search.Question, run: Run) -> Layouts:
    """Runs the searches that the chosen policies need; `given` layouts need none."""
    wanted = {POLICIES[name].layout for name in chosen}
    if question.mode is Mode.ROLLOUT and "own" in wanted:
        wanted.add("mixed")
    found: dict[Source, Layout] = {"uniform": uniform(question.spec)}
    cost = []
    if wanted & {"homogeneous", "mixed", "foresight"}:
        one = search.best(
            search.homogeneous_layouts(question.spec), question, run,
            refine=lambda leaders: search.neighbours(question.spec, leaders),
        )  # fmt: skip
        found["homogeneous"] = one.layout
        cost.append(("homogeneous", one.tried, one.steps))
        if wanted & {"mixed", "foresight"}:
            two = search.best(search.mixed_layouts(question.spec, one.layout), question, run)
            found["mixed"] = two.layout
            if question.mode is Mode.ROLLOUT:
                found["own"] = two.layout
            cost.append(("mixed", two.tried, two.steps))
            if "foresight" in wanted:
                finalists = list(dict.fromkeys((*two.finalists, *one.finalists)))
                best = search.best(finalists, question, run, make=Clairvoyant)
                found["foresight"] = best.layout
                cost.append(("foresight", best.tried, best.steps))
    if "colocated" in wanted:
        synchronous = replace(question, mode=Mode.COLOCATED)
        three = search.best(search.colocated_layouts(question.spec), synchronous, run, make=Colocated)
        found["colocated"] = three.layout
        cost.append(("colocated", three.tried, three.steps))
    return Layouts(found, tuple(cost))


def build(name: str, found: Layouts, given: Layout | None = None) -> list[Policy]:
    """A fresh policy with the layout of its source, or the one given; several of a bound."""
    entry = POLICIES[name]
    makes = entry.variants or (entry.make,)
    layout = given if given is not None else found.by_source.get(entry.layout)
    if layout is None and entry.layout == "own":
        return [make() for make in makes]
    assert layout is not None, f"no layout was searched for {name}"
    return [make(layout) for make in makes]
