"""What `libra simulate --preset NAME` does: a name, and a function that answers with a document and tables of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from services.common.errors import ConfigError, shown
from services.simulator import anchors, contrasts, experiment, profiles, traces
from services.simulator.anchors import Anchor
from services.simulator.layout import Layout
from services.simulator.policies import registry
from services.simulator.steptimes import ModelledEngine
from services.simulator.trainingtimes import ModelledTraining


@dataclass(frozen=True, slots=True)
class Table:
    """For people."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[object, ...], ...]


@dataclass(frozen=True, slots=True)
class Shown:
    """One answer: the JSON document, and the same as tables and notes."""

    document: dict[str, Any]
    tables: tuple[Table, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Asked:
    """What a preset may be told, of which each takes a part (`Preset.takes`)."""

    profile: str = anchors.MODELLED
    model: str = anchors.POLICY
    policies: str = "all"
    seeds: int = 3
    steps: int = 20
    workers: int | None = None
    layout: Layout | None = None
    """Of all policies but the synchronous ones, in the place of their own."""
    trace: tuple[Path, ...] = ()
    """Recorded episodes, agentic-traj/1."""

    def times(self) -> tuple[ModelledEngine, ModelledTraining]:
        """Of the model on the profile's machines."""
        hardware, model = profiles.profile(self.profile).hardware, profiles.model(self.model)
        return ModelledEngine(hardware, model), ModelledTraining(hardware, model)


DEFAULTS = Asked()


def anchors_preset(asked: Asked) -> Shown:
    """Published times and ratios, given and got."""
    del asked
    found = anchors.collect()
    rows = [{key: value for key, value in asdict(a).items() if key != "group"} for a in found]
    return Shown({"anchors": rows}, (_summary(found), _figures(found)))


def r2e_preset(asked: Asked) -> Shown:
    """Policies on 48 accelerators, lengths drifting."""
    found = experiment.r2e_48(
        *asked.times(), asked.policies, asked.seeds, steps=asked.steps, given=asked.layout, workers=asked.workers
    )
    tables = (*_compared(f"r2e-48 on {asked.profile}", found), _published(found))
    return Shown({"profile": asked.profile, **found}, tables, tuple(found["notes"]))


def shift_preset(asked: Asked) -> Shown:
    """Policies on 48 accelerators under an abrupt shift, and with two families of tasks in turn."""
    found = experiment.shift_48(*asked.times(), asked.policies, asked.seeds, steps=asked.steps, workers=asked.workers)
    tables = [t for name, one in found.items() for t in _compared(f"{name} on {asked.profile}", one)]
    notes = dict.fromkeys(note for one in found.values() for note in one["notes"])
    return Shown({"profile": asked.profile, **found}, tuple(tables), tuple(notes))


def failures_preset(asked: Asked) -> Shown:
    """One of four workers fails."""
    left_out = without_training(asked.policies)
    found = experiment.failures_4(asked.times()[0], asked.policies, asked.seeds, workers=asked.workers)
    columns = ("name", "kind", "total_s", "without_s", "ratio", "placed_late")
    rows = tuple(tuple(row[c] for c in columns) for row in found["policies"])
    return Shown(
        {"profile": asked.profile, **found, "notes": list(left_out)},
        (Table(f"failures-4 on {asked.profile}", columns, rows),),
        left_out,
    )


def without_training(policies: str) -> tuple[str, ...]:
    """A note on the policies that a run without training leaves out, if any. ConfigError if it leaves out all."""
    chosen, left_out = registry.without_training(registry.names(policies))
    if not chosen:
        able = ", ".join(registry.without_training(registry.POLICIES)[0])
        raise ConfigError(
            f"--policies {shown(policies)}: nothing is trained here, so synchronous policies are left out and none "
            f"remains; expected all or at least one of {able}"
        )
    return left_out


def outcomes_preset(asked: Asked) -> Shown:
    """What outcomes of tools are worth to `libra`, where they say something and where not."""
    recorded = {path.name: traces.read(path, np.random.default_rng(0)) for path in asked.trace}
    if len(recorded) < len(asked.trace):
        raise ConfigError("--trace: two files have the same name; expected names to tell their rows apart")
    found = contrasts.outcomes(asked.times()[0], recorded, asked.seeds, steps=asked.steps, workers=asked.workers)
    return _contrasted(asked, "outcomes", found)


def kv_preset(asked: Asked) -> Shown:
    """KV-aware admission, where KV caches are short and where they are ample."""
    found = contrasts.kv_48(*asked.times(), asked.seeds, steps=asked.steps, workers=asked.workers)
    notes = tuple(
        f"{case['name']}: {case['in_flight']:,.0f} final sequences of {case['mean_generated']:,.0f} generated tokens "
        f"on average are {case['kv_demand']:.2f} times what all KV caches hold ({case['kv_tokens']:,.0f} tokens)"
        for case in found["cases"]
    )
    return _contrasted(asked, "kv-48", found, notes)


def ablation_preset(asked: Asked) -> Shown:
    """`libra` with each mechanism off in turn."""
    found = contrasts.ablation(
        *asked.times(), asked.seeds, steps=asked.steps, given=asked.layout, workers=asked.workers
    )
    return Shown({"profile": asked.profile, **found}, (_contrast_table(f"ablation on {asked.profile}", found),))


def _contrasted(asked: Asked, title: str, found: dict[str, Any], notes: tuple[str, ...] = ()) -> Shown:
    tables = [_contrast_table(f"{title} on {asked.profile}: {case['name']}", case) for case in found["cases"]]
    return Shown({"profile": asked.profile, **found, "notes": list(notes)}, tuple(tables), notes)


def _contrast_table(title: str, case: dict[str, Any]) -> Table:
    columns = ("policy", "tokens/s", "libra over it", "5 %", "95 %", "idle rollout", "moved", "layout", "instead")
    rows = tuple(
        (
            row["name"], row["tokens_per_s"], row["libra_over"], *row["interval"], row["idle_rollout"],
            row["migrated_ratio"], row["layout"], row["instead"] or "-",
        )
        for row in case["policies"]
    )  # fmt: skip
    return Table(title, columns, rows)


@dataclass(frozen=True, slots=True)
class Preset:
    """A named scenario, and the fields of `Asked` that change what it does; no others may be set."""

    run: Callable[[Asked], Shown]
    takes: frozenset[str]
    own: Mapping[str, Any] = field(default_factory=dict)
    """Defaults that are its own."""


FAILURE_OPTIONS = frozenset({"profile", "model", "policies", "seeds", "workers"})
SHIFT_OPTIONS = FAILURE_OPTIONS | {"steps"}
CONTRAST_OPTIONS = SHIFT_OPTIONS - {"policies"}
PRESETS: dict[str, Preset] = {
    "anchors": Preset(anchors_preset, frozenset()),
    "r2e-48": Preset(r2e_preset, SHIFT_OPTIONS | {"layout"}),
    "shift-48": Preset(shift_preset, SHIFT_OPTIONS),
    "failures-4": Preset(failures_preset, FAILURE_OPTIONS),
    "outcomes": Preset(outcomes_preset, CONTRAST_OPTIONS | {"trace"}, {"steps": 6, "seeds": 8}),
    "kv-48": Preset(kv_preset, CONTRAST_OPTIONS, {"steps": 8}),
    "ablation": Preset(ablation_preset, CONTRAST_OPTIONS | {"layout"}, {"steps": 10}),
}


def run(name: str, options: Mapping[str, Any]) -> Shown:
    """The preset with the options that were set, fields of `Asked`; ConfigError for one that it does not take."""
    preset = PRESETS.get(name)
    if preset is None:
        raise ConfigError(f"--preset {shown(name)}: expected one of {', '.join(PRESETS)}")
    unknown = [option for option in options if option not in preset.takes]
    if unknown:
        takes = ", ".join(f"--{option}" for option in Asked.__dataclass_fields__ if option in preset.takes)
        wrong = ", ".join(f"--{option}" for option in unknown)
        raise ConfigError(f"--preset {name} takes no {wrong}; leave it out, it takes {takes or 'no further option'}")
    return preset.run(Asked(**{**preset.own, **options}))


COLUMNS = (
    "name", "tokens_per_s", "spread", "of_bound", "makespan_p50_s", "makespan_p95_s", "idle_rollout", "idle_training",
    "migrated_ratio", "max_staleness", "from_start", "layout",
)  # fmt: skip


def _published(found: dict[str, Any]) -> Table:
    rows = tuple((r["name"], r["given"], r["got"], r["source"]) for r in found["published"])
    return Table("Published ratios", ("ratio", "given", "got", "source"), rows)


HEADS = (
    "policy", "tokens/s", "spread", "of bound", "p50 s", "p95 s", "idle rollout", "idle training", "migrated",
    "staleness", "from start", "layout",
)  # fmt: skip


def _compared(title: str, found: dict[str, Any]) -> list[Table]:
    rows = [tuple("-" if row[c] is None else row[c] for c in COLUMNS) for row in found["policies"]]
    searched = tuple((s["for"], s["layouts"], s["steps"]) for s in found["searches"])
    return [
        Table(title, HEADS, tuple(rows)),
        Table("Searches", ("for", "layouts tried", "steps simulated"), searched),
    ]


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
