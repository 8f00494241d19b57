"""How much work is let in, and what a training step takes: the staleness bound, kept at both ends.

A token's age in a step is the step's base version minus the version that sampled it; K (`max_versions`) bounds it:

* at admission by prediction. Batches take groups in order, so a group admitted behind u unconsumed ones is taken about
  floor(u / batch) steps later. Its first token is sampled by what the engines serve now, which lags the head by
  `serving_lag`. It is admitted only if floor(u / batch) + serving_lag <= K. Time in the queue and in the closed buffer
  counts, since both are part of u;
* at `choose_batch` and again at `check_commit` by the versions that the segments record.

Under HOLD_TRAINER a step is not taken while an open group would be too old for the *next* one: the trainer waits, up to
`hold_timeout`, so that the group can close and be taken now. After that it goes the way of DROP_GROUP. Nobody waits for
an open group that is too old already: it ends STALE at once, so that nothing more is generated for it in vain.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from services.scheduler.core.reason import Reason

EVAL_IN_FLIGHT = 512
"""Trajectories of an EVAL run in flight, where the run has no quota."""


@dataclass(frozen=True, slots=True)
class AdmissionView:
    """What is known of one run at admission; counts of groups unless it says trajectories."""

    kind: str
    paused: bool
    max_versions: int
    batch_groups: int
    group_size: int
    unconsumed_groups: int
    """Open, closed or in a manifest that is not committed."""
    ready_groups: int
    in_flight: int
    """Trajectories admitted and not terminal."""
    max_in_flight: int
    """Quota in trajectories; 0 = none."""
    tasks_left: int
    serving_lag: int = 0
    """Head minus the oldest version that an admitting engine serves."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Groups to admit now."""

    count: int
    reason: Reason


def groups_to_admit(view: AdmissionView) -> Decision:
    """Groups that may be admitted so that none is predicted to be trained staler than K."""
    if view.paused:
        return Decision(0, Reason("PAUSED", "the run is paused"))
    if not view.tasks_left:
        return Decision(0, Reason("NO_TASKS", "no task is left"))
    if view.kind == "TRAIN":
        room = (view.max_versions + 1 - view.serving_lag) * view.batch_groups - view.unconsumed_groups
        quota = view.max_in_flight
    else:
        room = view.tasks_left
        quota = view.max_in_flight or EVAL_IN_FLIGHT
    if quota:
        room = min(room, (quota - view.in_flight) // view.group_size)
    count = max(0, min(room, view.tasks_left))
    numbers = {
        "unconsumed_groups": float(view.unconsumed_groups),
        "batch_groups": float(view.batch_groups),
        "max_versions": float(view.max_versions),
        "serving_lag": float(view.serving_lag),
        "in_flight": float(view.in_flight),
    }
    if count:
        return Decision(
            count, Reason("ADMIT", f"{count} groups keep the predicted age within {view.max_versions}", numbers)
        )
    text = (
        f"{view.unconsumed_groups} groups wait to be trained at {view.batch_groups} a step and engines lag by "
        f"{view.serving_lag}: one more would be older than {view.max_versions} versions, or beyond the quota"
    )
    return Decision(0, Reason("STALENESS_BOUND", text, numbers))


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Trainable tokens of one version in a closed group."""

    trajectory: str
    sequence: int
    first_position: int
    tokens: int
    number: int


@dataclass(frozen=True, slots=True)
class GroupView:
    """An open or closed group; `oldest_version` is None while no trainable token is known."""

    name: str
    admission_number: int
    closed: bool
    oldest_version: int | None
    spans: tuple[TokenSpan, ...] = ()


@dataclass(frozen=True, slots=True)
class BatchRules:
    """What a step wants, in groups, and the freshness rule."""

    groups: int
    min_groups: int
    multiple_of: int
    max_versions: int
    on_exceed: str
    look_ahead: int
    """A closed group is taken before an older open one only if it is among the first groups + look_ahead."""
    hold_timeout: float = 300.0


@dataclass(frozen=True, slots=True)
class BatchChoice:
    """Groups to take in order (empty: wait), groups that are too old, and spans to mask."""

    take: tuple[str, ...]
    stale: tuple[str, ...]
    masked: tuple[TokenSpan, ...]
    hold: bool
    reason: Reason


def choose_batch(
    groups: Sequence[GroupView],
    base: int,
    rules: BatchRules,
    waited: float,
    wait_limit: float,
    exhausted: bool,
    held: float = 0.0,
) -> BatchChoice:
    """What the step with this base version takes: oldest admitted first, with a bounded look-ahead.

    `waited` and `held` are seconds since the step was asked for and since it was first held back; `exhausted` says that
    no further group will come or close.
    """
    ordered = sorted(groups, key=lambda g: g.admission_number)
    stale: list[GroupView] = []
    fresh: list[GroupView] = []
    for group in ordered:
        (stale if _stale(group, base, rules) else fresh).append(group)
    gone = tuple(g.name for g in stale)
    window = fresh[: rules.groups + rules.look_ahead]
    closed = [g for g in window if g.closed]

    def urgent(group: GroupView) -> bool:
        return group.oldest_version is not None and base + 1 - group.oldest_version > rules.max_versions

    waiting_for = [g for g in fresh if not g.closed and urgent(g)] if rules.on_exceed == "HOLD_TRAINER" else []
    closed.sort(key=lambda g: (not urgent(g), g.admission_number))
    most = rules.groups // rules.multiple_of * rules.multiple_of
    enough = min(most, rules.min_groups if exhausted or waited >= wait_limit else rules.groups)
    count = min(len(closed), rules.groups) // rules.multiple_of * rules.multiple_of
    numbers = {
        "closed": float(len(closed)),
        "wanted": float(rules.groups),
        "enough": float(enough),
        "stale": float(len(stale)),
        "base": float(base),
    }
    if waiting_for and held < rules.hold_timeout and not exhausted:
        text = (
            f"held: {len(waiting_for)} open groups would be older than {rules.max_versions} versions at the next step"
        )
        return BatchChoice((), gone, (), True, Reason("HOLD_TRAINER", text, numbers))
    if not count or count < enough:
        text = f"{len(closed)} of {rules.groups} groups are ready"
        if stale:
            text += f"; {len(stale)} were older than {rules.max_versions} versions at base {base}"
        return BatchChoice((), gone, (), False, Reason("NOT_ENOUGH", text, numbers))
    chosen = sorted(closed[:count], key=lambda g: g.admission_number)
    masked = tuple(
        span
        for group in chosen
        for span in group.spans
        if rules.on_exceed == "MASK_TOKENS" and base - span.number > rules.max_versions
    )
    text = f"{count} groups, admission {chosen[0].admission_number} to {chosen[-1].admission_number}"
    return BatchChoice(tuple(g.name for g in chosen), gone, masked, False, Reason("BATCH", text, numbers))


def _stale(group: GroupView, base: int, rules: BatchRules) -> bool:
    """True if the group can no longer be trained: versions only rise, so an open one is not worth finishing either."""
    if group.oldest_version is None or base - group.oldest_version <= rules.max_versions:
        return False
    if rules.on_exceed != "MASK_TOKENS":
        return True
    # masked throughout, nothing of it would be trained
    return group.closed and all(base - span.number > rules.max_versions for span in group.spans)


def check_commit(members: Sequence[tuple[str, int]], base: int, max_versions: int) -> list[str]:
    """Members (name, oldest version or -1) whose oldest trainable token is staler than the bound at this base."""
    return [name for name, oldest in members if oldest >= 0 and base - oldest > max_versions]
