"""How answers look: tables for people, the contract's JSON for programs."""

import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from services.common import wire

STATE_STYLE = {
    "ACTIVE": "green", "ALIVE": "green", "OK": "green", "SUCCEEDED": "green", "TRAINED": "green", "FINISHED": "green",
    "QUEUED": "yellow", "STARTING": "yellow", "DRAINING": "yellow", "RELEASING": "yellow", "SUSPECT": "yellow",
    "RECOVERING": "yellow", "PAUSED": "yellow", "ROLLING_BACK": "yellow", "STALE": "red", "VOID": "red", "LOST": "red",
    "FAILED": "red", "QUARANTINED": "red", "UNCONFIRMED": "red", "RETIRED": "red", "CANCELLED": "red",
    "ROLLED_BACK": "red", "EXPIRED": "red",
}  # fmt: skip


def console() -> Console:
    """Standard output; tables are not cut when it is no terminal."""
    return Console(width=None if sys.stdout.isatty() else 160, highlight=False)


def as_json(message: wire.Message) -> dict[str, Any]:
    """The contract's JSON form, with the contract's field names."""
    fields: dict[str, Any] = wire.MessageToDict(message, preserving_proto_field_name=True)
    return fields


def document(content: Any) -> None:
    """One JSON document."""
    print(json.dumps(content, indent=2, ensure_ascii=False))


def line(content: Any) -> None:
    """One JSON line of a stream."""
    print(json.dumps(content, ensure_ascii=False), flush=True)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table; numbers to the right, states in colour. Says so when there is nothing."""
    rows = [list(row) for row in rows]
    if not rows:
        console().print(f"{title}: none")
        return
    shown = Table(title=title, title_justify="left", box=None, padding=(0, 1), header_style="bold")
    for index, name in enumerate(columns):
        numeric = all(isinstance(row[index], int | float) or row[index] in ("", "-") for row in rows)
        shown.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        shown.add_row(*(_cell(value) for value in row))
    console().print(shown)


def notes(texts: Iterable[str]) -> None:
    """A sentence a line, under what they are of."""
    for text in texts:
        console().print(Text(f"note: {text}"))


def facts(pairs: Mapping[str, object]) -> None:
    """Names and values, one a line."""
    width = max(len(name) for name in pairs)
    for name, value in pairs.items():
        console().print(Text.assemble((f"{name:<{width}}  ", "bold"), _cell(value)))


def _cell(value: object) -> Text:
    text = f"{value:,.3g}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)
    return Text(text, style=STATE_STYLE.get(text, ""))


# ---- words


def enum(kind: Any, prefix: str, value: int) -> str:
    """Name of an enum value without its prefix; "-" if not set."""
    name = str(kind.Name(value)).removeprefix(prefix)
    return "-" if name == "UNSPECIFIED" else name


def short(name: str) -> str:
    """A resource name as people say it: n0/2, rollout-1, the last part of others (shortened if it is a uid)."""
    parts = name.split("/")
    if len(parts) == 4 and parts[0] == "nodes":
        return f"{parts[1]}/{parts[3]}"
    if len(parts) == 4 and parts[2] == "sessions":
        return f"{parts[1]}#{parts[3]}"
    last = parts[-1]
    return last[:10] if len(last) >= 32 else last


def version(ref: wire.VersionRef) -> str:
    """A weight version, lineage-number; "-" if unset."""
    return f"{ref.lineage}-{ref.number}" if ref.lineage else "-"


def clock(time: wire.Timestamp) -> str:
    """A server time as local time of day."""
    return (
        datetime.fromtimestamp(time.seconds + time.nanos / 1e9).astimezone().strftime("%H:%M:%S")
        if time.seconds
        else "-"
    )


def why(reason: wire.Reason) -> str:
    """A reason as text with its numbers."""
    numbers = ", ".join(f"{name}={value:,.4g}" for name, value in sorted(reason.numbers.items()))
    text = reason.text or reason.code
    return f"{text} ({numbers})" if numbers else text


def load(worker: wire.Worker) -> str:
    """A worker's last load in a few words."""
    kind = worker.load.WhichOneof("kind")
    if kind == "rollout":
        return "; ".join(
            f"{e.running} running, {e.waiting} waiting, {e.generated_tokens:,} tokens"
            for e in worker.load.rollout.engines
        )
    if kind == "trainer":
        item = worker.load.trainer
        return f"{enum(wire.TrainerPhase, 'TRAINER_PHASE_', item.phase).lower()}, {item.trained_tokens:,} tokens"
    if kind == "toolenv":
        return f"{worker.load.toolenv.sessions} sessions"
    if kind == "node":
        return f"{worker.load.node.node.host_memory_free_bytes >> 20:,} MiB free"
    return ""


def terminal(run: wire.Run) -> str:
    """How many trajectories ended in which state."""
    counts: Counter[str] = Counter()
    for cell in run.counts.terminal:
        counts[cell.state] += cell.count
    return ", ".join(f"{count:,} {state.lower()}" for state, count in sorted(counts.items())) or "-"


def event(item: wire.Event) -> str:
    """One event in one line."""
    change = item.to_state if item.from_state == item.to_state else f"{item.from_state or '∅'} → {item.to_state or '∅'}"
    kind = enum(wire.ResourceKind, "RESOURCE_KIND_", item.kind).lower()
    by = f" [{item.caused_by}]" if item.caused_by else ""
    return (
        f"{item.revision:>7} {clock(item.time)} {kind:<12} {short(item.name):<20} {change:<22} {why(item.reason)}{by}"
    )
