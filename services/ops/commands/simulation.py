"""Commands around the simulator: simulate, calibrate."""

from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from services.common.errors import ConfigError
from services.ops import render
from services.ops.commands.options import Json
from services.simulator import calibrate as fitting
from services.simulator import presets, profiles
from services.simulator.calibrate import Fit
from services.simulator.layout import Layout
from services.simulator.profiles import EngineConstants, HardwareFile

Workers = Annotated[int | None, typer.Option("--workers", min=1, help="Processes; default: one a core.")]


def simulate(
    preset: Annotated[str, typer.Option("--preset", help=f"One of {', '.join(presets.PRESETS)}.")],
    profile: Annotated[str, typer.Option("--profile", help="Machines: a name or a file.")] = presets.DEFAULTS.profile,
    model: Annotated[str, typer.Option("--model", help="A model: a name or a file.")] = presets.DEFAULTS.model,
    policies: Annotated[str, typer.Option("--policies", help="all, or names with commas between.")] = "all",
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Runs of each policy.")] = presets.DEFAULTS.seeds,
    steps: Annotated[int, typer.Option("--steps", min=2, help="Training steps of a run.")] = presets.DEFAULTS.steps,
    layout: Annotated[str, typer.Option("--layout", help="Of r2e-48, for all: '24 training, 8xTP1 + 2xTP4'.")] = "",
    workers: Workers = None,
    json: Json = False,
) -> None:
    """Simulates a named scenario on modelled hardware; no cluster is needed."""
    run = presets.PRESETS.get(preset)
    if run is None:
        raise ConfigError(f"--preset {preset!r}: expected one of {', '.join(presets.PRESETS)}")
    shown = run(
        presets.Asked(profile, model, policies, seeds, steps, workers, Layout.parse(layout) if layout else None)
    )
    if json:
        render.document(shown.document)
        return
    for table in shown.tables:
        render.table(table.title, table.columns, table.rows)


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
