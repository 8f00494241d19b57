"""`libra replay`: recorded agent episodes through every policy, on modelled hardware."""

import itertools
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from services.ops import render
from services.ops.commands.options import Json
from services.ops.commands.simulation import Workers
from services.simulator import experiment, presets, profiles, traces
from services.simulator.steptimes import ModelledEngine
from services.simulator.workload import check_scale

PROFILES = ("a100-modelled", "a800-paper")
COLUMNS = ("policy", "makespan s", "5 %", "95 %", "of clairvoyant", "tokens/s", "migrated", "layout")


def replay(
    file: Annotated[Path, typer.Argument(help="Recorded episodes, agentic-traj/1 (JSON lines).")],
    policies: Annotated[str, typer.Option("--policies", help="all, or names with commas between.")] = "all",
    profile: Annotated[list[str] | None, typer.Option("--profile", help="Machines; may be repeated.")] = None,
    model: Annotated[str, typer.Option("--model", help="A model: a name or a file.")] = presets.DEFAULTS.model,
    latency: Annotated[list[float] | None, typer.Option("--latency", help="Factors of tool seconds: 0 1 5.")] = None,
    scale: Annotated[list[float] | None, typer.Option("--scale", help="Factors of generated tokens: 1 4 10.")] = None,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Bootstrap samples of whole groups.")] = 5,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of tool seconds that the file lacks.")] = 0,
    workers: Workers = None,
    json: Json = False,
) -> None:
    """Replays recorded episodes on four modelled accelerators, each policy on the same samples."""
    presets.without_training(policies)
    episodes = traces.read(file, np.random.default_rng(seed))
    shape = profiles.model(model)
    times = {name: ModelledEngine(profiles.profile(name).hardware, shape) for name in profile or PROFILES}
    latencies, scales = latency or experiment.LATENCIES, scale or experiment.SCALES
    for generated, seconds in itertools.product(scales, latencies):  # all of them, before the first is simulated
        check_scale(episodes, generated=generated, latency=seconds)
    found = experiment.replay(episodes, times, policies, samples, latencies=latencies, scales=scales, workers=workers)
    if json:
        render.document({"file": str(file), "model": shape.name, "seed": seed, **found})
        return
    for cell in found["cells"]:
        title = f"{cell['profile']}, tool seconds x{cell['latency']:g}, generated tokens x{cell['scale']:g}"
        intervals = f"; quantiles of {samples} samples"
        render.table(title + intervals, COLUMNS, [_row(row) for row in cell["policies"]])
    render.notes(dict.fromkeys(note for cell in found["cells"] for note in cell["notes"]))


def _row(row: dict[str, Any]) -> tuple[object, ...]:
    low, high = row["interval"]
    ratio = "-" if row["of_bound"] is None else row["of_bound"]
    return (
        row["name"], row["makespan_s"], low, high, ratio, row["tokens_per_s"], row["migrated_ratio"], row["layout"]
    )  # fmt: skip
