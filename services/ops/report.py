"""report.html: the run on one page, one self-contained file, readable without a network."""

import base64
import html
from collections.abc import Iterable, Sequence
from pathlib import Path
from string import Template
from typing import Any

from services.common import wire
from services.common.errors import ConfigError
from services.ops import summary, timeline
from services.ops.archive import Archive

PAGE = Path(__file__).with_name("assets") / "report.html"
MAX_VIOLATIONS = 50
POOLS = {
    wire.POOL_CORE_TRAINING: "core training", wire.POOL_CORE_ROLLOUT: "core rollout", wire.POOL_HYBRID: "hybrid",
}  # fmt: skip


def write(archive: Archive) -> Path:
    """Writes report.html, whole or not at all; needs summary.json and verdict.json in the folder."""
    path = archive.folder / "report.html"
    part = path.with_name(".report.html.part")
    part.write_text(render(archive), encoding="utf-8")
    part.replace(path)
    return path


def render(archive: Archive) -> str:
    """The page. ConfigError if matplotlib is not installed."""
    try:
        from services.ops import plots
    except ImportError as error:
        raise ConfigError(f"the report needs matplotlib ({error}); install libra-rl[report]") from None
    content, steps = archive.summary or summary.build(archive), timeline.steps(archive)
    killed = _killed(archive)
    early, late = timeline.lengths(archive)
    times, series = timeline.generation_speed(archive)
    queue_times, levels = timeline.queue(archive)
    figures = {
        "reward": plots.reward(steps, content.get("eval_reward_start"), content.get("eval_reward_end")),
        "tail": plots.tail(early, late),
        "accelerators": plots.accelerators(timeline.spans(archive), _labels(archive), killed),
        "staleness": plots.staleness(steps, content.get("staleness_bound")),
        "speed": plots.speed(times, series, steps),
        "queue": plots.queue(queue_times, levels),
        "split": plots.time_split(timeline.time_split(archive)),
    }
    passed = bool(archive.verdict.get("passed"))
    return Template(PAGE.read_text(encoding="utf-8")).substitute(
        {name: _image(svg, name) for name, svg in figures.items()},
        name=html.escape(archive.folder.name),
        machine=html.escape(_machine(content)),
        verdict_class="good" if passed else "bad",
        verdict="every promise holds" if passed else "promises are broken",
        tiles=_tiles(content),
        moves=_moves(content),
        preemptions=_preemptions(content),
        promises=_promises(archive),
        killed=_killed_table(killed),
    )


def _image(svg: str, name: str) -> str:
    data = base64.b64encode(svg.encode()).decode()
    return f'<img alt="{name}" src="data:image/svg+xml;base64,{data}">'


def _machine(content: dict[str, Any]) -> str:
    machine = content.get("machine") or {}
    parts = [
        f"{machine.get('cpus', '?')} CPUs", f"{machine.get('memory_gib', '?')} GiB", str(machine.get("system", "")),
        f"seed {content.get('seed')}",
    ]  # fmt: skip
    return " · ".join(p for p in parts if p)


def _tiles(content: dict[str, Any]) -> str:
    start, end = content.get("eval_reward_start"), content.get("eval_reward_end")
    moves, stops = content["reassignments"], content["preemptions"]
    rows = (
        ("held-out reward", f"{_number(start)} → {_number(end)}", "256 tasks, temperature 1, before and after"),
        ("steps", str(content["steps"]), f"{content['trajectories_trained']:,} trajectories trained"),
        (
            "tokens / s",
            f"{content['tokens_per_s']:,.0f}",
            f"{content['tokens_generated']:,} in {content['wall_s']:.0f} s",
        ),
        ("accelerators moved", f"{moves['to_training']} + {moves['to_rollout']}", "to training + to rollout"),
        ("preemptions", str(sum(stops.values())), f"{content['preempted_resumed']} resumed"),
        ("tokens lost", str(content["tokens_lost"]), f"{content['tokens_regenerated']} regenerated after a crash"),
        ("staleness", str(content["max_staleness"]), f"versions at most; bound {content['staleness_bound']}"),
        ("logprob mismatches", str(content["segments_mismatched"]), "in moved trajectories, scored again"),
    )
    return "".join(
        f'<div class="tile"><span>{html.escape(a)}</span><b>{html.escape(b)}</b><small>{html.escape(c)}</small></div>'
        for a, b, c in rows
    )


def _moves(content: dict[str, Any]) -> str:
    rows = [
        (
            f"{m['at_s']:.0f} s", ", ".join(_short(a) for a in m["accelerators"]),
            f"{m['from'].lower()} → {m['to'].lower()}", m["reason"], _signed(m["predicted_gain_tokens_per_s"]),
            _signed(m["observed_gain_tokens_per_s"]), f"{m['took_s']:.1f} s", m["state"].lower().replace("_", " "),
        )
        for m in content["reassignment_list"]
    ]  # fmt: skip
    head = ("at", "accelerator", "move", "reason", "predicted gain", "observed gain", "took", "state")
    return _table(head, rows, "No accelerator changed sides.", numeric=(0, 4, 5, 6))


def _preemptions(content: dict[str, Any]) -> str:
    why = {
        "cmlfq": "the queue gave its place to other work, or moved it to a faster level",
        "handover": "its engine was handed over",
        "operator": "somebody asked for it",
    }
    rows = [(cause, str(count), why.get(cause, "")) for cause, count in content["preemptions"].items()]
    return _table(("by", "number", "because"), rows, "", numeric=(1,))


def _promises(archive: Archive) -> str:
    verdict = archive.verdict
    rows = [
        (name, promise["text"], "holds" if not promise["violations"] else f"{promise['violations']} violations")
        for name, promise in verdict.get("promises", {}).items()
    ]
    table = _table(("", "promise", "verdict"), rows, "The checker did not run.", verdict=2)
    violations = verdict.get("violations", [])[:MAX_VIOLATIONS]
    listed = [(v["check"], v["resource"], v["text"]) for v in violations]
    return table + (_table(("check", "where", "what"), listed, "") if listed else "")


def _killed(archive: Archive) -> list[tuple[float, str]]:
    origin = summary.origin_time(archive)
    return [(f.t - origin, f"{f['process']}: {f['what']} at step {f['step']}") for f in archive.facts_of("killed")]


def _killed_table(killed: Sequence[tuple[float, str]]) -> str:
    if not killed:
        return ""
    rows = [(f"{at:.1f} s", what) for at, what in killed]
    return '<section class="card wide"><h2>Killed on purpose</h2>' + _table(("at", "process"), rows, "") + "</section>"


def _table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    empty: str,
    *,
    numeric: Sequence[int] = (),
    verdict: int | None = None,
) -> str:
    body = "".join(
        "<tr>" + "".join(_cell(i, str(v), numeric, verdict) for i, v in enumerate(row)) + "</tr>" for row in rows
    )
    if not body:
        return f"<p class='empty'>{html.escape(empty)}</p>"
    titles = "".join(f"<th{' class=n' if i in numeric else ''}>{html.escape(t)}</th>" for i, t in enumerate(head))
    return f"<table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>"


def _cell(index: int, value: str, numeric: Sequence[int], verdict: int | None) -> str:
    kind = "n" if index in numeric else ""
    if index == verdict:
        kind = "good" if value == "holds" else "bad"
    return f'<td class="{kind}">{html.escape(value)}</td>'


def _labels(archive: Archive) -> dict[str, str]:
    return {a.name: f"{_short(a.name)}  {POOLS.get(a.pool, '')}" for a in archive.accelerators}


def _short(accelerator: str) -> str:
    node, _, index = accelerator.removeprefix("nodes/").partition("/accelerators/")
    return f"{node}:{index}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _signed(value: float | None) -> str:
    return "not measured" if value is None else f"{value:+.1f} tok/s"
