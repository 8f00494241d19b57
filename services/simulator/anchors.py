"""Anchors: published times and ratios, and what the simulator gets for them, computed anew at each run.

`data/anchors.yaml` has the figures with their sources. Rows of a table (step times, transfers) are computed from the
row itself; every other figure by a function registered under the figure's name:

    @anchors.figure("R2E-Gym: C-MLFQ over static uniform")
    def ladder() -> float: ...

A module that does so is imported by whoever calls `collect`. A figure in the file without a function, or the reverse,
is an error.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median

from services.common.errors import ConfigError
from services.simulator import profiles, tptable
from services.simulator.calibrate import StepRow
from services.simulator.hardware import Hardware, ModelShape
from services.simulator.profiles import Profile
from services.simulator.steptimes import ModelledEngine
from services.simulator.tptable import LONG, SHORT, Lengths
from services.simulator.trainingtimes import ModelledTraining
from services.simulator.transferfits import Split, TransferRow
from services.simulator.transfers import host_copy_s, weight_sync_s

FILE = Path(__file__).with_name("data") / "anchors.yaml"

MODELLED = "a100-modelled"
PAPER = "a800-paper"
POLICY = "qwen3-14b"
"""The paper's dense model."""
LONGEST = 40_960
"""The paper's longest trajectory, in tokens."""
STEP_S = 454.0
"""The paper's step, of which switching takes a share."""
BATCH = 512
TRAINER_ACCELERATORS = 8
TRAINER_REPLICAS = 3
GROUPS = {
    "broadcast": "weight sync",
    "weight_sync": "weight sync",
    "sleep": "sleep, wake",
    "wake": "sleep, wake",
    "cold_start": "cold start",
}
"""Groups of transfers, by event."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Rows of a table that were held out of the fit of one kind of machine."""

    hardware: str
    source: str
    rows: str
    """A line each: model, tp, phase, batch, context tokens of each, milliseconds."""

    def parsed(self) -> list[StepRow]:
        """The lines as rows."""
        found = []
        for line in self.rows.splitlines():
            model, tp, phase, batch, context, milliseconds = line.split()
            found.append(StepRow(model, int(tp), phase, int(batch), int(context), float(milliseconds) / 1e3))
        return found


@dataclass(frozen=True, slots=True)
class Figure:
    """One published figure that a function computes."""

    name: str
    given: float
    split: Split
    source: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Data:
    """The file."""

    step_times: tuple[StepTimes, ...]
    transfers: tuple[TransferRow, ...]
    figures: tuple[Figure, ...]


@dataclass(frozen=True, slots=True)
class Anchor:
    """One figure: as given, and as the simulator gets it. `error` is |got / given - 1|."""

    name: str
    split: Split
    given: float
    got: float
    error: float
    note: str
    group: str
    """Of the table for people."""


FIGURES: dict[str, Callable[[], float]] = {}


def figure(name: str) -> Callable[[Callable[[], float]], Callable[[], float]]:
    """Registers what computes the figure of this name."""

    def register(compute: Callable[[], float]) -> Callable[[], float]:
        if name in FIGURES:
            raise ValueError(f"two functions compute the figure {name!r}")
        FIGURES[name] = compute
        return compute

    return register


@cache
def data() -> Data:
    """The figures as published."""
    return profiles.read(FILE, Data)


def collect() -> list[Anchor]:
    """All anchors, in the file's order."""
    found = data()
    known = {item.name for item in found.figures}
    if known != set(FIGURES):
        odd = ", ".join(sorted(known ^ set(FIGURES)))
        raise ConfigError(f"{FILE.name}: figures and functions that compute them do not match: {odd}")
    return [
        *(anchor for table in found.step_times for anchor in _step_times(table)),
        *(_transfer(row) for row in found.transfers),
        *(_anchor(f.name, f.split, f.given, FIGURES[f.name](), f.note, "figures") for f in found.figures),
    ]


def median_error(found: Iterable[Anchor], split: Split, group: str = "") -> float:
    """Of the anchors of a split, and a group where one is given."""
    return median(a.error for a in found if a.split == split and group in ("", a.group))


def _anchor(name: str, split: Split, given: float, got: float, note: str, group: str) -> Anchor:
    return Anchor(name, split, given, got, abs(got / given - 1), note, group)


def _step_times(table: StepTimes) -> Iterable[Anchor]:
    hardware = profiles.profile(table.hardware).hardware
    engines = {name: ModelledEngine(hardware, profiles.model(name)) for name in {row.model for row in table.parsed()}}
    for row in table.parsed():
        name = f"{table.hardware} {row.model} tp{row.tp} {row.phase} of {row.batch} x {row.context} tokens, s"
        got = engine_s(engines[row.model], row)
        yield _anchor(name, "held", row.seconds, got, "", f"{table.hardware} {row.phase}")


def engine_s(engine: ModelledEngine, row: StepRow) -> float:
    """What an engine takes for a row's step."""
    if row.phase == "decode":
        return engine.decode_s(row.tp, row.batch, float(row.batch * row.context))
    return engine.prefill_s(row.tp, float(row.context), 0.0)


def _transfer(row: TransferRow) -> Anchor:
    hardware = _profile(MODELLED).hardware
    match row.event:
        case "weight_sync" | "broadcast":
            got = weight_sync_s(hardware, row.bytes, row.accelerators, gathered=row.event == "weight_sync")
        case "sleep" | "wake":
            got = host_copy_s(hardware, row.bytes, row.accelerators)
        case "cold_start":
            start = hardware.operations.cold_start
            got = start.base_s + row.bytes / start.load_bytes_s
    name = f"{row.event.replace('_', ' ')}: {row.name}, s"
    return _anchor(name, row.split, row.seconds, got, row.note, GROUPS[row.event])


@cache
def _profile(name: str) -> Profile:
    return profiles.profile(name)


@cache
def _model(name: str = POLICY) -> ModelShape:
    return profiles.model(name)


# ---- figures that need no events


def _register_tp_table(profile: str) -> None:
    def hardware() -> Hardware:
        return _profile(profile).hardware

    def ratio_of(lengths: Lengths) -> Callable[[], float]:
        return lambda: tptable.ratio(hardware(), _model(), lengths)

    def rate_of(tp: int, lengths: Lengths) -> Callable[[], float]:
        return lambda: tptable.tokens_per_s(hardware(), _model(), tp, lengths)

    for lengths, words in ((SHORT, "0-2K"), (LONG, "16-32K")):
        figure(f"{profile}: 1 x TP8 over 8 x TP1, {words} tokens")(ratio_of(lengths))
        figure(f"{profile}: 8 x TP1, {words} tokens, tokens/s")(rate_of(1, lengths))
        figure(f"{profile}: 1 x TP8, {words} tokens, tokens/s")(rate_of(8, lengths))


for _name in (MODELLED, PAPER):
    _register_tp_table(_name)


def _training_s(tokens: int) -> float:
    training = ModelledTraining(_profile(MODELLED).hardware, _model())
    return training.step_s(TRAINER_REPLICAS, TRAINER_ACCELERATORS, [tokens] * BATCH)


@figure("training step, 1K to 32K tokens a sequence")
def training_growth() -> float:
    """512 sequences of each length on 24 accelerators in three replicas."""
    return _training_s(32_768) / _training_s(1_024)


@figure("training step, 1K to 32K tokens a sequence, per token")
def training_growth_per_token() -> float:
    """The same over the tokens trained."""
    return training_growth() / 32


@figure("switch, train to rollout, s")
def switch_to_rollout_s() -> float:
    """One node: the trainer's state to the host, an engine of TP8 wakes and loads the new weights."""
    hardware = _profile(PAPER).hardware
    engine, training = ModelledEngine(hardware, _model()), ModelledTraining(hardware, _model())
    update = engine.weight_update_s(TRAINER_ACCELERATORS, TRAINER_ACCELERATORS)
    return training.offload_s(1, TRAINER_ACCELERATORS) + engine.wake_s(TRAINER_ACCELERATORS) + update


@figure("switch, rollout to train, s")
def switch_to_training_s() -> float:
    """One node: the engine of TP8 sleeps, the trainer's state comes back from the host."""
    hardware = _profile(PAPER).hardware
    engine, training = ModelledEngine(hardware, _model()), ModelledTraining(hardware, _model())
    return engine.sleep_s(TRAINER_ACCELERATORS) + training.offload_s(1, TRAINER_ACCELERATORS)


@figure("switch both ways, share of a step of 454 s")
def switch_share() -> float:
    """Both switches once in a step, nothing of them hidden."""
    return (switch_to_rollout_s() + switch_to_training_s()) / STEP_S


@figure("KV move of 40K tokens, same node, s")
def kv_move_near_s() -> float:
    """Qwen3-14B, one NVLink port."""
    return ModelledEngine(_profile(PAPER).hardware, _model()).kv_move_s(LONGEST, same_node=True)


@figure("KV move of 40K tokens, across nodes, s")
def kv_move_far_s() -> float:
    """Qwen3-14B, one network interface."""
    return ModelledEngine(_profile(PAPER).hardware, _model()).kv_move_s(LONGEST, same_node=False)
