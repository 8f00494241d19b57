"""The file of rates: what engines and trainers of each kind are believed to do, before anything is observed.

`libra rates` writes one from a profile. The planner corrects it by what it sees; the file is not changed.

    profile: a100-modelled qwen3-14b
    engines:
    - {type: a100-80gb, tp: 1, step_s: 0.0164, sequence_s: 4.0e-05, context_s: 1.2e-07, kv_tokens: 200000}
    trainers:
    - {type: a100-80gb, accelerators: 4, token_s: 0.0003, micro_batch_tokens: 40960}
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, TypeVar

import yaml
from pydantic import Field, field_validator

from services.common import config
from services.common.config import Strict
from services.common.errors import ConfigError
from services.scheduler.config import SchedulerConfig
from services.scheduler.core.rates import EngineKind, EngineRates, TrainerKind, TrainerRates

C = TypeVar("C", bound=SchedulerConfig)
Amount = Annotated[float, Field(ge=0, le=1e18, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False)]
Type = Annotated[str, Field(min_length=1, max_length=64)]


class EngineRow(Strict):
    """`EngineRates` of engines of one accelerator type and tensor-parallel degree. Seconds, tokens, bytes."""

    type: Type
    tp: int = Field(ge=1, le=1_024)
    step_s: float = Field(gt=0, le=86_400, allow_inf_nan=False)
    sequence_s: Seconds
    context_s: Seconds
    kv_tokens: float = Field(ge=1, le=1e18, allow_inf_nan=False)
    prefill_s: Seconds = 0.0
    max_running: int = Field(256, ge=1, le=1_000_000)
    start_s: Seconds = 0.0
    pause_s: Seconds = 0.0
    asleep_bytes: Amount = 0.0


class TrainerRow(Strict):
    """`TrainerRates` of training replicas of so many accelerators of one type. Seconds, tokens, bytes."""

    type: Type
    accelerators: int = Field(ge=1, le=1_024)
    token_s: float = Field(gt=0, le=86_400, allow_inf_nan=False)
    square_s: Seconds = 0.0
    gather_s: Seconds = 0.0
    fixed_s: Seconds = 0.0
    reduce_s: Seconds = 0.0
    micro_batch_tokens: float | None = Field(None, ge=1, le=1e18, allow_inf_nan=False)
    """None: it holds any sequence."""
    start_s: Seconds = 0.0
    asleep_bytes: Amount = 0.0


class RatesFile(Strict):
    """The file as written."""

    profile: str = Field("", max_length=128)
    """Where the figures are from; shown in plans."""
    engines: list[EngineRow] = Field(min_length=1)
    trainers: list[TrainerRow] = Field(min_length=1)

    @field_validator("engines")
    @classmethod
    def _engines_once(cls, value: list[EngineRow]) -> list[EngineRow]:
        _once([(r.type, r.tp) for r in value], "type {} with tp {}")
        return value

    @field_validator("trainers")
    @classmethod
    def _trainers_once(cls, value: list[TrainerRow]) -> list[TrainerRow]:
        _once([(r.type, r.accelerators) for r in value], "type {} with {} accelerators")
        return value


@dataclass(frozen=True)
class RateTable:
    """Rates by kind. At least one kind of engine and of trainer."""

    profile: str
    engines: Mapping[EngineKind, EngineRates]
    trainers: Mapping[TrainerKind, TrainerRates]

    @cached_property
    def degrees(self) -> tuple[int, ...]:
        """Tensor-parallel degrees of all types, ascending."""
        return tuple(sorted({k.tp for k in self.engines}))

    def level(self, tp: int) -> int:
        """Queue level of engines of a degree: its place among those of the table, so that wider ones are higher."""
        return sum(d < tp for d in self.degrees)

    def least(self, role: str, type_: str) -> int | None:
        """Accelerators of the smallest replica of a role ("TRAINER", "ROLLOUT"); None if a type has none."""
        if role == "TRAINER":
            return min((k.accelerators for k in self.trainers if k.type == type_), default=None)
        return min((k.tp for k in self.engines if k.type == type_), default=None)

    def has(self, role: str, type_: str, accelerators: int) -> bool:
        """True if the table has replicas of a role of so many accelerators."""
        if role == "TRAINER":
            return TrainerKind(type_, accelerators) in self.trainers
        return EngineKind(type_, accelerators) in self.engines

    def max_running(self, type_: str, tp: int) -> int | None:
        """Sequences that an engine of a kind may run at once; None if the table lacks the kind."""
        rates = self.engines.get(EngineKind(type_, tp))
        return None if rates is None else rates.max_running


def beside(settings: C, path: str | Path) -> C:
    """The configuration of the file `path`, its file of rates found relative to that one."""
    if not settings.planner.rates:
        return settings
    found = (Path(path).parent / settings.planner.rates).absolute()
    return settings.model_copy(update={"planner": settings.planner.model_copy(update={"rates": str(found)})})


def read(path: str | Path) -> RateTable:
    """The table of a file; ConfigError names file, line, what was found and what was expected."""
    return _table(config.load(path, RatesFile))


def loads(text: str, source: str) -> RateTable:
    """As `read`, from text; `source` is named in messages."""
    return _table(config.loads(text, RatesFile, source))


def dumps(table: RateTable) -> str:
    """The file of a table; `loads` reads the same from it."""
    rows = {
        "profile": table.profile,
        "engines": [{"type": k.type, "tp": k.tp, **_plain(r)} for k, r in sorted(table.engines.items())],
        "trainers": [
            {"type": k.type, "accelerators": k.accelerators, **_plain(r)} for k, r in sorted(table.trainers.items())
        ],
    }
    return yaml.safe_dump(rows, sort_keys=False, width=120).replace("$", "$$")  # as configuration files have it


def write(path: str | Path, table: RateTable) -> None:
    """A file that `read` reads. ConfigError for a table that it would refuse; refuses to overwrite."""
    text = dumps(table)
    loads(text, str(path))
    try:
        with Path(path).open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{path} exists already; name another file or remove it") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot write the file: {error.strerror}") from None


def _plain(rates: EngineRates | TrainerRates) -> dict[str, float]:
    """Fields that are finite, as the types that YAML knows (numpy's are not)."""
    fields = asdict(rates).items()
    return {n: v if isinstance(v, int) else float(v) for n, v in fields if math.isfinite(v)}


def _table(file: RatesFile) -> RateTable:
    engines = {EngineKind(r.type, r.tp): EngineRates(**r.model_dump(exclude={"type", "tp"})) for r in file.engines}
    trainers = {}
    for row in file.trainers:
        fields = row.model_dump(exclude={"type", "accelerators"})
        fields["micro_batch_tokens"] = fields["micro_batch_tokens"] or math.inf
        trainers[TrainerKind(row.type, row.accelerators)] = TrainerRates(**fields)
    return RateTable(file.profile, engines, trainers)


def _once(kinds: Sequence[tuple[Hashable, ...]], words: str) -> None:
    twice = [k for k in kinds if kinds.count(k) > 1]
    if twice:
        raise ValueError(f"{words.format(*twice[0])} is there twice; expected one row for each kind")
