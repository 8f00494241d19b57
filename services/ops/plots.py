"""The report's figures, drawn with matplotlib and returned as SVG text. Imported only by the report."""

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib as mpl

mpl.use("svg")

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from services.ops.timeline import Span, Step

INK, MUTED, GRID = "#1f2937", "#6b7280", "#e5e7eb"
ROLE_COLOURS = {"TRAINER": "#7c3aed", "ROLLOUT": "#0891b2"}
OTHER_ROLE = "#9ca3af"
SERIES = ("#0891b2", "#f59e0b", "#10b981", "#ef4444", "#7c3aed", "#64748b")
AGE_COLOURS = ("#a7f3d0", "#fcd34d", "#fb923c", "#f87171", "#b91c1c")
PHASE_COLOURS = {
    "train": "#7c3aed", "reduce": "#a78bfa", "logprobs": "#c4b5fd", "fetch": "#93c5fd", "commit": "#34d399",
    "publish": "#10b981", "recover": "#ef4444", "wait_batch": "#e5e7eb", "unspecified": "#f3f4f6",
    "generating": "#0891b2", "switching": "#fcd34d", "idle": "#e5e7eb", "asleep": "#f3f4f6",
}  # fmt: skip
PHASE_WORDS = {"wait_batch": "waits for a batch", "unspecified": "holds no replica", "publish": "publishes weights"}
WIDE, HALF = (11.2, 2.9), (5.4, 3.1)
STYLE = {
    "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"], "font.size": 9, "axes.edgecolor": "#d1d5db",
    "axes.labelcolor": MUTED, "text.color": INK, "xtick.color": MUTED, "ytick.color": MUTED, "axes.grid": True,
    "grid.color": GRID, "grid.linewidth": 0.7, "axes.axisbelow": True, "axes.spines.top": False,
    "axes.spines.right": False, "svg.hashsalt": "libra", "legend.frameon": False, "legend.fontsize": 8,
}  # fmt: skip


def draw(size: tuple[float, float], paint: Callable[[Any], None]) -> str:
    """One figure with one axes, painted; SVG text that is the same for the same content."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        paint(figure.add_subplot())
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


def reward(steps: Sequence[Step], before: float | None, after: float | None) -> str:
    """Mean reward of each step's batch, and the held-out reward before and after."""

    def paint(axes: Any) -> None:
        x, y = [s.number for s in steps], [s.reward for s in steps]
        axes.plot(x, y, color=SERIES[0], marker="o", markersize=3.5, linewidth=1.2, alpha=0.55, label="batch")
        if len(y) >= 5:
            smooth = [float(np.mean(y[max(0, i - 2) : i + 3])) for i in range(len(y))]
            axes.plot(x, smooth, color=SERIES[0], linewidth=2.2, label="batch, mean of 5")
        last = max(x, default=1)
        for at, value, label in ((0, before, "held-out before"), (last + 1, after, "held-out after")):
            if value is not None:
                axes.plot(
                    [at],
                    [value],
                    marker="D",
                    markersize=8,
                    linestyle="",
                    color=SERIES[3 if at == 0 else 2],
                    label=label,
                )
                axes.annotate(
                    f"{value:.2f}", (at, value), textcoords="offset points", xytext=(0, 9), ha="center", weight="bold"
                )
        axes.set(xlabel="step", ylabel="mean reward", ylim=(0, 1.05))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(loc="lower right")

    return draw(HALF, paint)


def tail(early: Sequence[int], late: Sequence[int]) -> str:
    """Share of trajectories with at least so many generated tokens, axes logarithmic: the tail is the right end."""

    def paint(axes: Any) -> None:
        for values, colour, label in ((early, SERIES[0], "first half of the tasks"), (late, SERIES[1], "second half")):
            if not values:
                continue
            x = np.sort(np.asarray(values))
            share = 1.0 - np.arange(len(x)) / len(x)
            named = f"{label}, longest {x[-1]}"
            axes.step(x, share, where="post", color=colour, linewidth=1.8, label=named)
            axes.plot([x[-1]], [share[-1]], marker="o", color=colour, markersize=4)
        axes.set(xscale="log", yscale="log", xlabel="generated tokens", ylabel="share at least as long")
        if early or late:
            axes.legend(loc="lower left")

    return draw(HALF, paint)


def accelerators(spans: Sequence[Span], names: Mapping[str, str], killed: Sequence[tuple[float, str]]) -> str:
    """Who held each accelerator over time, coloured by role; pale while a replica comes or goes."""

    def paint(axes: Any) -> None:
        rows = sorted({s.accelerator for s in spans})
        for span in spans:
            colour = ROLE_COLOURS.get(span.role, OTHER_ROLE)
            axes.barh(
                rows.index(span.accelerator), span.end - span.start, left=span.start, height=0.62, color=colour,
                alpha=1.0 if span.settled else 0.35, linewidth=0,
            )  # fmt: skip
        for at, _ in killed:
            axes.axvline(at, color=SERIES[3], linewidth=1.1, linestyle=(0, (3, 2)))
        axes.set_yticks(range(len(rows)), [names.get(r, r) for r in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set(xlabel="seconds since the training run began")
        axes.grid(visible=False, axis="y")
        handles = [Patch(color=c, label=r.lower()) for r, c in ROLE_COLOURS.items()]
        handles.append(Patch(color=OTHER_ROLE, alpha=0.35, label="coming or going (pale)"))
        if killed:
            handles.append(Patch(color=SERIES[3], label="a process was killed"))
        axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, 1.17), ncols=4)

    return draw((WIDE[0], 2.6), paint)


def staleness(steps: Sequence[Step], bound: int | None) -> str:
    """Trained tokens of each step by age in versions."""

    def paint(axes: Any) -> None:
        ages = sorted({age for s in steps for age in s.ages})
        bottom = np.zeros(len(steps))
        for age in ages:
            total = np.array([max(1, sum(s.ages.values())) for s in steps])
            share = np.array([s.ages.get(age, 0) for s in steps]) / total
            colour = AGE_COLOURS[min(max(age, 0), len(AGE_COLOURS) - 1)]
            axes.bar(
                [s.number for s in steps], share, bottom=bottom, width=0.85, color=colour, label=f"{age} versions old"
            )
            bottom += share
        axes.set(xlabel="step", ylabel="share of trained tokens", ylim=(0, 1))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        title = f"bound: {bound}" if bound is not None else None
        if ages:
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.2), ncols=len(ages), title=title)

    return draw(HALF, paint)


def speed(times: Sequence[float], series: Mapping[str, Sequence[float]], steps: Sequence[Step]) -> str:
    """Generated tokens/s by worker, stacked, and the tokens/s that training took in."""

    def paint(axes: Any) -> None:
        if times:
            colours = [SERIES[i % len(SERIES)] for i in range(len(series))]
            axes.stackplot(times, *series.values(), labels=list(series), colors=colours, alpha=0.75, linewidth=0)
        if len(steps) > 1:
            ends = [s.end for s in steps]
            rates = [s.trained_tokens / max(0.1, b - a) for s, a, b in zip(steps[1:], ends, ends[1:], strict=False)]
            axes.step(ends[1:], rates, where="pre", color=INK, linewidth=1.4, label="trained")
        axes.set(xlabel="seconds since the training run began", ylabel="tokens / s")
        axes.set_ylim(bottom=0)
        if times or len(steps) > 1:
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.17), ncols=5)

    return draw(WIDE, paint)


def queue(times: Sequence[float], levels: Mapping[str, Sequence[float]]) -> str:
    """Waiting trajectories by level."""

    def paint(axes: Any) -> None:
        for i, (level, values) in enumerate(levels.items()):
            axes.step(times, values, where="post", color=SERIES[i % len(SERIES)], linewidth=1.5, label=f"level {level}")
        highest = max((v for values in levels.values() for v in values), default=0.0)
        axes.set(xlabel="seconds since the training run began", ylabel="waiting trajectories")
        axes.set_ylim(0, 1.3 * max(1.0, highest))
        if levels:
            axes.legend(loc="upper right")

    return draw(HALF, paint)


def time_split(split: Mapping[str, Mapping[str, float]]) -> str:
    """Share of its time that each worker spent on what."""

    def paint(axes: Any) -> None:
        workers = list(split)
        phases = [p for p in PHASE_COLOURS if any(p in rows for rows in split.values())]
        left = np.zeros(len(workers))
        for phase in phases:
            share = np.array([split[w].get(phase, 0.0) / max(1e-9, sum(split[w].values())) for w in workers])
            axes.barh(
                workers, share, left=left, height=0.68, color=PHASE_COLOURS[phase], label=PHASE_WORDS.get(phase, phase)
            )
            left += share
        axes.set(xlabel="share of time", xlim=(0, 1))
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        if phases:
            axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.02), fontsize=7)

    return draw(HALF, paint)
