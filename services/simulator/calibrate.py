"""Fits the constants of step times: from a table of step times, or from what a worker reported of its own steps.

The constants enter linearly (`steptimes.py`), so the fit is a non-negative least squares of relative errors; constants
over a datasheet figure are at least 1. Of a table whole (model, tp) combinations are held out, by a rule that knows no
times: with models and tps each in order, the combination (i, j) is held where (i + j) % 3 == 0. Each tp and, from three
tps on, each model is held somewhere and fitted somewhere.

A worker's reports show one model at one tp or two, which cannot tell the constants apart. There the fit starts from the
constants of a known kind of machine and leaves them only as far as the reports say so (a ridge towards them).
"""

import csv
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import yaml

from services.common.errors import ConfigError, shown
from services.simulator import profiles
from services.simulator.hardware import AcceleratorType, DecodeConstants, ModelShape, PrefillConstants
from services.simulator.profiles import EngineConstants, HardwareFile
from services.simulator.steptimes import (
    LARGEST_TP,
    Row,
    decode_quantities,
    decode_terms,
    prefill_quantities,
    prefill_terms,
    weigh,
)
from services.simulator.workload import MOST_TOKENS

C = TypeVar("C", DecodeConstants, PrefillConstants)
Constants = DecodeConstants | PrefillConstants

OVER_DATASHEET = {
    "dense_read", "expert_read", "kv_read", "collective_bytes", "dense_arithmetic", "expert_arithmetic", "attention",
    "weight_read",
}  # fmt: skip
"""At least 1: nothing is faster than its datasheet."""
FOLDS = 3
PULL = 1e-4
"""Weight of the known constants in a fit to reports: twice one of them counts like 1 % of error in every row."""
LEAST = 1e-9
"""A known constant of 0 is held there as firmly as one of this."""
DIGITS = 4
"""Significant digits of constants in files."""
COLUMNS = ("model", "tp", "phase", "batch", "ctx_tokens", "latency_ms", "fits_memory")
REPORT_KEYS = ("tp", "sequences", "context_tokens", "seconds_per_step")
SHORTEST_STEP_S = 1e-9
LONGEST_STEP_S = 86_400.0
BOUNDS: Mapping[str, tuple[float, float]] = {
    "tp": (1, LARGEST_TP),
    "batch": (1, MOST_TOKENS),
    "ctx_tokens": (1, MOST_TOKENS),
    "latency_ms": (1e3 * SHORTEST_STEP_S, 1e3 * LONGEST_STEP_S),
    "sequences": (1, MOST_TOKENS),
    "context_tokens": (0, MOST_TOKENS),
    "seconds_per_step": (SHORTEST_STEP_S, LONGEST_STEP_S),
}
"""Least and greatest of the numbers that are read; beyond them the fit's own numbers would overflow."""


@dataclass(frozen=True, slots=True)
class StepRow:
    """One measured or modelled step: prefill of `context` tokens, or decoding of `batch` sequences of so many each."""

    model: str
    tp: int
    phase: str
    """decode or prefill."""
    batch: int
    context: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Fit:
    """Constants of a table, and the relative errors of the rows fitted and held."""

    constants: EngineConstants
    fitted: tuple[tuple[StepRow, float], ...]
    held: tuple[tuple[StepRow, float], ...]

    def median_error(self, *, held: bool, phase: str = "") -> float:
        """Of the rows of a phase, or of both."""
        rows = self.held if held else self.fitted
        return median(error for row, error in rows if phase in ("", row.phase))


def read_table(path: str | Path) -> list[StepRow]:
    """The rows that fit the device's memory; ConfigError names file, line and column."""
    rows = []
    reader = csv.DictReader(_opened(path))
    try:
        missing = [c for c in COLUMNS if c not in (reader.fieldnames or [])]
        if missing:
            raise ConfigError(f"{path}:1: no column {', '.join(missing)}; expected {', '.join(COLUMNS)}")
        for cells in reader:
            row = _table_row(cells, f"{path}:{reader.line_num}")
            if cells["fits_memory"].strip() == "1":
                rows.append(row)
    except csv.Error as error:
        raise ConfigError(f"{path}:{reader.line_num + 1}: not CSV: {error}") from None
    if not rows:
        raise ConfigError(f"{path}: no row with fits_memory 1: nothing to fit")
    return rows


def _table_row(cells: Mapping[str, str], where: str) -> StepRow:
    absent = [c for c in COLUMNS if cells[c] is None]
    if absent:
        raise ConfigError(f"{where}: no value of {', '.join(absent)}; expected {', '.join(COLUMNS)}")
    try:
        tp, batch, context = int(cells["tp"]), int(cells["batch"]), int(cells["ctx_tokens"])
        milliseconds = float(cells["latency_ms"])
    except ValueError as error:
        raise ConfigError(f"{where}: {error}; expected numbers in tp, batch, ctx_tokens and latency_ms") from None
    if cells["phase"] not in ("decode", "prefill"):
        raise ConfigError(f"{where}: phase {shown(cells['phase'])}; expected decode or prefill")
    _check({"tp": tp, "batch": batch, "ctx_tokens": context, "latency_ms": milliseconds}, where)
    return StepRow(cells["model"], tp, cells["phase"], batch, context, milliseconds / 1e3)


def _check(values: Mapping[str, float], where: str) -> None:
    """Raises ConfigError for one that is out of BOUNDS; NaN is."""
    for name, value in values.items():
        low, high = BOUNDS[name]
        if not low <= value <= high:
            raise ConfigError(f"{where}: {name} is {shown(value)}; expected at least {low:g} and at most {high:g}")


def is_held(rows: Sequence[StepRow], fold: int = 0) -> Callable[[StepRow], bool]:
    """The rule above, for the models and tps of these rows; `fold` 1 and 2 hold the other two thirds."""
    models, tps = sorted({r.model for r in rows}), sorted({r.tp for r in rows})
    return lambda row: (models.index(row.model) + tps.index(row.tp)) % FOLDS == fold


def fit_table(
    rows: Sequence[StepRow], accelerator: AcceleratorType, models: Mapping[str, ModelShape], fold: int = 0
) -> Fit:
    """Constants from the rows that are not held. `models`: shapes by the table's names."""
    held = is_held(rows, fold)
    used = [row for row in rows if not held(row)]
    name = f"{sum(not held(r) for r in rows)} of {len(rows)} rows: (model, tp) not held by (i + j) % 3 == {fold}"
    constants = EngineConstants(
        name, _fit(DecodeConstants, used, accelerator, models), _fit(PrefillConstants, used, accelerator, models)
    )
    judged = [(row, relative_error(row, constants, accelerator, models[row.model])) for row in rows]
    fitted = tuple(j for j in judged if not held(j[0]))
    return Fit(constants, fitted, tuple(j for j in judged if held(j[0])))


def predicted_s(row: StepRow, constants: EngineConstants, accelerator: AcceleratorType, model: ModelShape) -> float:
    """What the model says of a row."""
    kind: type[Constants] = DecodeConstants if row.phase == "decode" else PrefillConstants
    terms, quantities = _problem(kind, row, accelerator, model)
    factors = weigh(constants.decode if row.phase == "decode" else constants.prefill, terms)
    return sum(f * q for f, q in zip(factors, quantities, strict=True))


def relative_error(row: StepRow, constants: EngineConstants, accelerator: AcceleratorType, model: ModelShape) -> float:
    """|got / given - 1|."""
    return abs(predicted_s(row, constants, accelerator, model) / row.seconds - 1)


def fit_reports(path: str | Path, machine: HardwareFile, model: ModelShape) -> tuple[HardwareFile, float]:
    """`machine` with the decoding constants that a worker's recorded steps show, and their median relative error.

    The file has a JSON object a line: tp, sequences, context_tokens (of all sequences), seconds_per_step.
    """
    reports = _read_reports(path)
    assert machine.constants is not None
    accelerator, known = machine.accelerator, machine.constants.decode
    rows = [(decode_terms(accelerator, model, int(r["tp"])), _report_quantities(r, model)) for r in reports]
    seconds = [r["seconds_per_step"] for r in reports]
    decode = _solve(DecodeConstants, rows, seconds, known)
    constants = replace(machine.constants, decode=decode, fitted_to=f"{len(rows)} reports of {model.name}")
    got = [_dot(weigh(decode, terms), quantities) for terms, quantities in rows]
    error = median(abs(g / s - 1) for g, s in zip(got, seconds, strict=True))
    return replace(machine, constants=constants, constants_of=""), error


def _report_quantities(report: Mapping[str, float], model: ModelShape) -> Row:
    return decode_quantities(model, report["sequences"], report["context_tokens"])


def _read_reports(path: str | Path) -> list[dict[str, float]]:
    reports = [_report(line, f"{path}:{number}") for number, line in enumerate(_opened(path), start=1) if line.strip()]
    if not reports:
        raise ConfigError(f"{path}: no reports; expected JSON lines with {', '.join(REPORT_KEYS)}")
    return reports


def _report(line: str, where: str) -> dict[str, float]:
    try:
        content = json.loads(line)
        values = {key: float(content[key]) for key in REPORT_KEYS}
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise ConfigError(f"{where}: {error}; expected a JSON object with numbers {', '.join(REPORT_KEYS)}") from None
    _check(values, where)
    if not values["tp"].is_integer():
        raise ConfigError(f"{where}: tp is {values['tp']:g}; expected a whole number of accelerators")
    return values


def _opened(path: str | Path) -> io.StringIO:
    """The lines of a file."""
    try:
        return io.StringIO(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the file: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 at byte {error.start}; expected lines of text") from None


# ---- the least squares


def _problem(
    kind: type[Constants], row: StepRow, accelerator: AcceleratorType, model: ModelShape
) -> tuple[dict[str, Row], Row]:
    if kind is DecodeConstants:
        return decode_terms(accelerator, model, row.tp), decode_quantities(model, row.batch, row.batch * row.context)
    return prefill_terms(accelerator, model, row.tp), prefill_quantities(model, float(row.context), 0.0)


def _fit(kind: type[C], rows: Sequence[StepRow], accelerator: AcceleratorType, models: Mapping[str, ModelShape]) -> C:
    phase = "decode" if kind is DecodeConstants else "prefill"
    of_phase = [row for row in rows if row.phase == phase]
    problem = [_problem(kind, row, accelerator, models[row.model]) for row in of_phase]
    return _solve(kind, problem, [row.seconds for row in of_phase], None)


def _solve(kind: type[C], rows: Sequence[tuple[dict[str, Row], Row]], seconds: Sequence[float], known: C | None) -> C:
    """The constants with the least squared relative errors, floors kept; with `known`, pulled towards it."""
    names = list(kind.__dataclass_fields__)
    if len(rows) < len(names) and known is None:
        raise ConfigError(f"{len(rows)} rows for {len(names)} constants of {kind.__name__}: too few to fit")
    features = [[_dot(terms[name], quantities) for name in names] for terms, quantities in rows]
    floors = [1.0 if name in OVER_DATASHEET else 0.0 for name in names]
    wanted = None if known is None else [getattr(known, name) for name in names]
    found = least_squares(features, seconds, floors, wanted)
    return kind(**{name: rounded(value) for name, value in zip(names, found, strict=True)})


def least_squares(
    features: Any, seconds: Sequence[float], floors: Sequence[float] = (), wanted: Sequence[float] | None = None
) -> list[float]:
    """Minimises sum ((features x) / seconds - 1)^2, plus a pull towards `wanted`, over x >= floors (default 0)."""
    import numpy as np

    left, right = np.array(features) / np.array(seconds)[:, None], np.ones(len(seconds))
    if wanted is not None:
        target = np.array(wanted)
        pull = math.sqrt(PULL * len(seconds)) * np.diag(1.0 / np.maximum(target, LEAST))
        left, right = np.vstack([left, pull]), np.concatenate([right, pull @ target])
    low = np.array(floors) if len(floors) else np.zeros(left.shape[1])
    scale = np.maximum(np.abs(left).max(axis=0), 1e-300)  # of very different sizes: seconds, bytes
    return [float(x) for x in _nnls(left / scale, right - left @ low) / scale + low]


def _nnls(left: Any, right: Any) -> Any:
    try:
        from scipy.optimize import nnls
    except ImportError:
        raise ConfigError("scipy is not installed, which fits constants; install libra-rl[simulator]") from None
    return nnls(left, right)[0]


def _dot(one: Row, other: Row) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


def rounded(value: float) -> float:
    """As constants stand in files."""
    return float(f"{value:.{DIGITS}g}")


# ---- files


def write(path: str | Path, machine: HardwareFile) -> None:
    """A hardware file that `profiles.hardware_file` reads. Refuses to overwrite."""
    content = {key: value for key, value in asdict(machine).items() if value not in (None, "")}
    content["sources"] = list(machine.sources)
    try:
        with Path(path).open("x") as file:
            yaml.safe_dump(content, file, sort_keys=False, width=110)
    except FileExistsError:
        raise ConfigError(f"{path} exists already; name another file or remove it") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot write the file: {error.strerror}") from None


def shapes(rows: Sequence[StepRow], paths: Sequence[str] = ()) -> dict[str, ModelShape]:
    """The models that a table names: the package's own, or those of the files `paths`."""
    own = {shape.name: shape for shape in map(profiles.model, paths)}
    known = profiles.names("models")
    missing = sorted({r.model for r in rows if r.model not in own and r.model.lower() not in known})
    if missing:
        raise ConfigError(f"no model of the package's is called {', '.join(missing)}; name their files by --model")
    return {name: own.get(name) or profiles.model(name) for name in {row.model for row in rows}}
