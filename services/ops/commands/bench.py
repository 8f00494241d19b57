"""Commands that measure on this machine, without a cluster: bench decisions."""

from pathlib import Path
from typing import Annotated

import typer

from services.common.errors import ConfigError
from services.ops import render
from services.ops.commands.options import Json
from services.scheduler.core.cmlfq import QueueSettings
from services.simulator import routing

app = typer.Typer(help="Measures a part of Libra on this machine.", no_args_is_help=True)

SHOWN = 20
"""Trajectories in the table; --json has all."""


@app.callback()
def _group() -> None:
    """Keeps `decisions` a command of its own name."""


@app.command()
def decisions(
    events: Annotated[Path, typer.Option("--events", help="JSON lines: schedule, tool_return, finish.")],
    engines: Annotated[int, typer.Option(min=1, max=4_096, help="Engines, if the events name none.")] = 8,
    slots: Annotated[int, typer.Option(min=1, max=65_536, help="Places of each engine.")] = 64,
    json: Json = False,
) -> None:
    """Runs a router's event list through the decision core: its rate, and where each trajectory goes."""
    try:
        with events.open(encoding="utf-8") as lines:
            found = routing.read(lines, str(events))
    except OSError as error:
        raise ConfigError(f"--events {events}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"--events {events}: not UTF-8 at byte {error.start}; expected JSON lines") from None
    result = routing.route(found, engines, slots, QueueSettings())
    times = sorted(result.seconds)
    figures = {
        "events": len(times),
        "events_per_s": len(times) / max(1e-9, sum(times)),
        "p50_us": 1e6 * times[len(times) // 2],
        "p99_us": 1e6 * times[len(times) * 99 // 100],
    }
    if json:
        render.document(
            {
                **figures,
                "counts": dict(result.counts),
                "decided": dict(result.decided),
                "same_first_engine": {"agreed": result.agreed, "compared": result.compared},
                "trajectories": result.places,
            }
        )
        return
    facts = {"events": f"{len(times):,} ({', '.join(f'{count:,} {kind}' for kind, count in result.counts.items())})"}
    facts["rate"] = f"{figures['events_per_s']:,.0f} events/s"
    facts["a decision"] = f"p50 {figures['p50_us']:.0f} us, p99 {figures['p99_us']:.0f} us"
    facts["decided"] = ", ".join(f"{code} {count:,}" for code, count in result.decided.most_common()) or "nothing"
    if result.compared:
        facts["as the router"] = f"{result.agreed:,} of {result.compared:,} went to the engine that it chose"
    render.facts(facts)
    rows = [(name, " -> ".join(places) or "waits") for name, places in list(result.places.items())[:SHOWN]]
    more = len(result.places) - len(rows)
    render.table(f"Where they went{f' ({more:,} more with --json)' if more else ''}", ["trajectory", "engines"], rows)


__all__ = ["app", "decisions"]
