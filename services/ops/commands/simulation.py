"""Commands around the simulator: simulate, calibrate, rates."""

from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from services.common.errors import ConfigError
from services.ops import render
from services.ops.commands.options import Json
from services.scheduler import rates as tables
from services.scheduler.rates import RateTable
from services.simulator import calibrate as fitting
from services.simulator import presets, priors, profiles
from services.simulator.calibrate import Fit
from services.simulator.layout import Layout
from services.simulator.profiles import EngineConstants, HardwareFile
from services.simulator.steptimes import ModelledEngine
from services.simulator.trainingtimes import ModelledTraining

Workers = Annotated[int | None, typer.Option("--workers", min=1, help="Processes; default: one a core.")]


def _option(name: str, words: str, least: int | None = None) -> Any:
    """One whose default the preset has."""
    field = name.removeprefix("--")
    default = getattr(presets.DEFAULTS, field)
    own = "".join(f"; {preset} {one.own[field]}" for preset, one in presets.PRESETS.items() if field in one.own)
    return typer.Option(name, min=least, help=words, show_default=f"{default}{own}" if default else False)


def simulate(
    preset: Annotated[str, typer.Option("--preset", help=f"One of {', '.join(presets.PRESETS)}.")],
    profile: Annotated[str | None, _option("--profile", "Machines: a name or a file.")] = None,
    model: Annotated[str | None, _option("--model", "A model: a name or a file.")] = None,
    policies: Annotated[str | None, _option("--policies", "all, or names with commas between.")] = None,
    seeds: Annotated[int | None, _option("--seeds", "Runs of each policy.", least=1)] = None,
    steps: Annotated[int | None, _option("--steps", "Training steps of a run.", least=2)] = None,
    layout: Annotated[
        str | None, _option("--layout", "Of r2e-48 and ablation, for all: '24 training, 8xTP1 + 2xTP4'.")
    ] = None,
    trace: Annotated[
        list[Path] | None, _option("--trace", "Of outcomes: recorded episodes, agentic-traj/1; may be repeated.")
    ] = None,
    workers: Workers = None,
    json: Json = False,
) -> None:
    """Simulates a named scenario on modelled hardware; no cluster is needed.

    An option that the scenario has no use for is refused.
    """
    given = {
        "profile": profile, "model": model, "policies": policies, "seeds": seeds, "steps": steps, "workers": workers,
        "layout": None if layout is None else Layout.parse(layout), "trace": tuple(trace) if trace else None,
    }  # fmt: skip
    shown = presets.run(preset, {name: value for name, value in given.items() if value is not None})
    if json:
        render.document(shown.document)
        return
    for table in shown.tables:
        render.table(table.title, table.columns, table.rows)
    render.notes(shown.notes)


def calibrate(
    hardware: Annotated[str, typer.Option("--hardware", help="Kind of machine whose datasheet holds: name or file.")],
    table: Annotated[Path | None, typer.Option("--table", help="CSV of step times of several models and tps.")] = None,
    reports: Annotated[Path | None, typer.Option("--reports", help="JSON lines of one worker's steps.")] = None,
    model: Annotated[list[str] | None, typer.Option("--model", help="A model: a name or a file.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Hardware file to write.")] = None,
    json: Json = False,
) -> None:
    """Fits the constants of a kind of machine to measured step times."""
    machine, models = profiles.hardware_file(hardware), model or []
    if table is not None and reports is None:
        fitted, errors = _from_table(table, machine, models)
    elif reports is not None and table is None:
        fitted, errors = _from_reports(reports, machine, models)
    else:
        raise ConfigError("expected either --table FILE or --reports FILE")
    if out is not None:
        fitting.write(out, fitted)
    assert fitted.constants is not None
    _show(fitted.constants, errors, out, as_json=json)


def _from_table(table: Path, machine: HardwareFile, models: list[str]) -> tuple[HardwareFile, dict[str, float]]:
    rows = fitting.read_table(table)
    fit = fitting.fit_table(rows, machine.accelerator, fitting.shapes(rows, models))
    constants = replace(fit.constants, fitted_to=f"{table.name}: {fit.constants.fitted_to}")
    return replace(machine, constants=constants, constants_of=""), _errors(fit)


def _errors(fit: Fit) -> dict[str, float]:
    """Median relative errors, by what they are of; phases that the table lacks are left out."""
    found = {}
    for words, rows in (("fitted", fit.fitted), ("held", fit.held)):
        for phase in ("decode", "prefill"):
            errors = [error for row, error in rows if row.phase == phase]
            if errors:
                found[f"{words} {phase}"] = median(errors)
    return found


def _from_reports(reports: Path, machine: HardwareFile, models: list[str]) -> tuple[HardwareFile, dict[str, float]]:
    if len(models) != 1:
        raise ConfigError(f"--reports is of a worker that serves one model: expected one --model, found {len(models)}")
    fitted, error = fitting.fit_reports(reports, machine, profiles.model(models[0]))
    return fitted, {"fitted decode": error}


def _show(constants: EngineConstants, errors: dict[str, float], out: Path | None, *, as_json: bool) -> None:
    content: dict[str, Any] = {**asdict(constants), "median_error": errors, "file": str(out) if out else ""}
    if as_json:
        render.document(content)
        return
    rows = [(phase, name, value) for phase in ("decode", "prefill") for name, value in content[phase].items()]
    render.table("Constants", ("phase", "constant", "value"), rows)
    render.facts({"fitted to": constants.fitted_to, **{f"median error, {k}": f"{v:.1%}" for k, v in errors.items()}})
    if out is not None:
        render.console().print(f"wrote {out}", markup=False)


def rates(
    profile: Annotated[str, typer.Option("--profile", help="Machines: a name or a file.")],
    model: Annotated[str, typer.Option("--model", help="A model: a name or a file.")],
    type_: Annotated[str, typer.Option("--type", help="Accelerator type, as the nodes report it.")],
    out: Annotated[Path, typer.Option("--out", help="File to write, for planner.rates of the scheduler.")],
    tp: Annotated[
        str, typer.Option("--tp", help="Degrees of engines; those that cannot hold it or split its heads fall out.")
    ] = "1,2,4,8",
    trainer_accelerators: Annotated[
        str, typer.Option("--trainer-accelerators", help="Of a training replica; those that are too few fall out.")
    ] = "1,2,4,8",
    json: Json = False,
) -> None:
    """Writes the table of rates that the planner of whole layouts begins with."""
    if not 1 <= len(type_) <= 64:
        raise ConfigError(f"--type {type_!r}: expected the name that the nodes report, of 1 to 64 characters")
    degrees, sizes = _counts("--tp", tp), _counts("--trainer-accelerators", trainer_accelerators)
    hardware, shape = profiles.profile(profile).hardware, profiles.model(model)
    engine, training = ModelledEngine(hardware, shape), ModelledTraining(hardware, shape)
    table = RateTable(
        f"{Path(profile).stem} {shape.name}",
        priors.engine_rates(
            engine, type_, [d for d in degrees if not shape.heads % d], asleep_bytes=shape.weight_bytes
        ),
        priors.trainer_rates(
            training, type_, sizes, hardware.operations.training.micro_batch_tokens, asleep_bytes=training.state_bytes
        ),
    )
    least = training.min_accelerators()
    if not table.trainers:
        raise ConfigError(f"--trainer-accelerators {trainer_accelerators}: a replica of {shape.name} needs {least}")
    if not table.engines:
        raise ConfigError(
            f"--tp {tp}: no such engine holds {shape.name} ({shape.heads} attention heads) on "
            f"{hardware.accelerator.name}; give wider ones that divide its heads"
        )
    tables.write(out, table)
    rows = {
        "engines": [{"tp": k.tp, **asdict(r)} for k, r in table.engines.items()],
        "trainers": [{"accelerators": k.accelerators, **asdict(r)} for k, r in table.trainers.items()],
    }
    if json:
        render.document({"type": type_, **rows, "file": str(out)})
        return
    engines = [(k.tp, r.decode_s(1.0, 8_192.0), r.kv_tokens, r.start_s) for k, r in table.engines.items()]
    render.table("Engines", ("tp", "s/token alone at 8,192", "KV tokens", "start s"), engines)
    trainers = [(k.accelerators, r.token_s, r.micro_batch_tokens) for k, r in table.trainers.items()]
    render.table("Trainers", ("accelerators", "s/token", "micro-batch tokens"), trainers)
    render.console().print(f"wrote {out}", markup=False)


def _counts(option: str, text: str) -> list[int]:
    parts = [p.strip() for p in text.split(",")]
    if not all(p.isdecimal() and 1 <= int(p) <= 1_024 for p in parts):
        raise ConfigError(f"{option} {text}: expected numbers of 1 to 1,024 with commas between, such as 1,2,4,8")
    return sorted({int(p) for p in parts})
