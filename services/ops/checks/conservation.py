"""P14: each acknowledged token of an attempt appears exactly once in the final record, readable and unchanged.

Acknowledged is what a worker wrote down after the scheduler had answered its report; the final record is what the
scheduler shows at the end. Tokens of an attempt that failed and was begun anew are discarded by a recorded decision:
they are counted apart and are not lost.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from services.common import wire
from services.ops.archive import Archive, Fact, trajectory_state
from services.ops.checks.finding import Finding
from services.ops.checks.segments import Segments

LeaseKey = tuple[str, int, int]
"""(trajectory, attempt, lease epoch)."""
CRASH_ENDS = frozenset({"", "dropped", "refused", "LOST", "ENGINE", "WORKER"})
"""Ways a lease ends without the worker's word on all of its tokens; empty: the process was gone before it could say."""


@dataclass(slots=True)
class Lease:
    """What one worker wrote down of one lease."""

    who: str = ""
    generated: int = 0
    """Generated tokens of the attempt when last written down."""
    acknowledged: int = 0
    """Generated tokens acknowledged in this lease."""
    kept: int = 0
    """Generated tokens of the attempt that were registered when it began."""
    how: str = ""
    started: bool = False


def check(archive: Archive, segments: Segments) -> Finding:
    """Counts `tokens_lost`, `tokens_regenerated`, `tokens_discarded` and `preempted_resumed`."""
    finding = Finding({"tokens_lost": 0, "tokens_discarded": 0, "acknowledged_segments": 0})
    record = {t.name: t for t in archive.trajectories}
    for trajectory in record.values():
        _record_is_whole(trajectory, finding)
    _acknowledged(archive, record, segments, finding)
    _manifests_agree(archive, record, finding)
    leases = read_leases(archive)
    cancelled = {name for name, t in record.items() if trajectory_state(t) == "CANCELLED"}
    finding.numbers["tokens_regenerated"] = _regenerated(leases, cancelled)
    preempted, elsewhere = _resumed(archive, leases)
    finding.numbers |= {"preempted_resumed": preempted, "resumed_elsewhere": elsewhere}
    return finding


def _record_is_whole(trajectory: wire.Trajectory, finding: Finding) -> None:
    """Segments of each sequence follow one another from its fork on, and the totals are their sums."""
    trainable = 0
    for sequence in trajectory.sequences:
        expected = sequence.fork_position
        for item in sequence.segments:
            if item.first_position != expected:
                kind = "P14.gap" if item.first_position > expected else "P14.overlap"
                finding.add(
                    kind, trajectory.name,
                    f"sequence {sequence.index}: a segment starts at {item.first_position}, expected {expected}",
                )  # fmt: skip
            expected = item.first_position + item.tokens
            trainable += item.trainable_tokens
    generated = sum(t.generated_tokens for t in trajectory.turns)
    if (trajectory.tokens.generated, trajectory.tokens.trainable) != (generated, trainable):
        finding.add(
            "P14.totals", trajectory.name,
            f"totals say {trajectory.tokens.generated} generated and {trajectory.tokens.trainable} trainable tokens, "
            f"its turns and segments {generated} and {trainable}",
        )  # fmt: skip


def _acknowledged(archive: Archive, record: dict[str, wire.Trajectory], segments: Segments, finding: Finding) -> None:
    seen: dict[tuple[str, int, int, int], str] = {}
    for fact in archive.facts_of("acked"):
        key = (fact["trajectory"], int(fact["attempt"]), int(fact["sequence"]), int(fact["first_position"]))
        if key in seen:
            if seen[key] != fact["sha256"]:
                finding.add("P14.acknowledged_twice", key[0], f"two contents were acknowledged at {key[2:]}")
            continue
        seen[key] = fact["sha256"]
        finding.count("acknowledged_segments")
        trajectory = record.get(key[0])
        if trajectory is not None and _discarded(trajectory, key[1]):
            finding.count("tokens_discarded", int(fact["tokens"]))
            continue
        why = _why_lost(trajectory, fact, segments)
        if why:
            finding.count("tokens_lost", int(fact["tokens"]))
            finding.add(
                "P14.tokens_lost", key[0],
                f"{fact['tokens']} tokens at {key[3]} of sequence {key[2]}, acknowledged to {fact.who}: {why}",
            )  # fmt: skip


def _discarded(trajectory: wire.Trajectory, attempt: int) -> bool:
    """True if this attempt failed and another took its place, by a recorded decision."""
    return trajectory.attempt > attempt and any(a.number == attempt and a.failure for a in trajectory.attempts)


def _why_lost(trajectory: wire.Trajectory | None, fact: Fact, segments: Segments) -> str:
    if trajectory is None:
        return "the final record does not know the trajectory"
    if trajectory.attempt != int(fact["attempt"]):
        return f"the final record holds attempt {trajectory.attempt}, and no failure of attempt {fact['attempt']}"
    for sequence in trajectory.sequences:
        if sequence.index != int(fact["sequence"]):
            continue
        for item in sequence.segments:
            if item.first_position != int(fact["first_position"]):
                continue
            if (item.tokens, item.blob.sha256) != (int(fact["tokens"]), fact["sha256"]):
                return f"the final record holds {item.tokens} other tokens there"
            columns = segments.columns(item)
            return columns if isinstance(columns, str) else ""
    return "the final record has no segment there"


def _manifests_agree(archive: Archive, record: dict[str, wire.Trajectory], finding: Finding) -> None:
    """What was trained is what is recorded."""
    for row in archive.members:
        name = row.member.trajectory
        trajectory = record.get(name)
        if trajectory is None:
            finding.add("P14.unknown_member", name, f"in {row.manifest}, absent from the final record")
        elif trajectory.attempt != row.member.attempt:
            continue
        elif _content(trajectory.sequences) != _content(row.member.sequences):
            finding.add("P14.member_differs", name, f"{row.manifest} holds other segments than the record")


def _content(sequences: Iterable[wire.Sequence]) -> list[tuple[int, int, int, str]]:
    return [(s.index, i.first_position, i.tokens, i.blob.sha256) for s in sequences for i in s.segments]


# ---- leases


def read_leases(archive: Archive) -> dict[LeaseKey, Lease]:
    """What the workers wrote down of each lease."""
    leases: dict[LeaseKey, Lease] = defaultdict(Lease)
    for fact in archive.facts_of("leased", "generated", "acked", "ended"):
        lease = leases[fact["trajectory"], int(fact["attempt"]), int(fact["lease_epoch"])]
        lease.who = fact.who
        if fact.kind == "leased":
            lease.started, lease.kept = True, int(fact.get("kept_tokens", 0))
        elif fact.kind == "generated":
            lease.generated = max(lease.generated, int(fact["generated"]))
        elif fact.kind == "acked":
            lease.acknowledged += int(fact.get("trainable_tokens", 0))
        else:
            lease.how = str(fact.get("how", "ended"))
    return dict(leases)


def _regenerated(leases: dict[LeaseKey, Lease], cancelled: set[str]) -> int:
    """Tokens that were generated and not acknowledged when their lease ended by a crash, and so had to be made again.

    `generated` and `kept` are totals of the attempt: what the next lease began with is what had been acknowledged of
    this one. Tokens written down nowhere (the last chunk before a SIGKILL) are not seen: the count is a lower bound.
    """
    attempts: dict[tuple[str, int], list[tuple[int, Lease]]] = defaultdict(list)
    for (trajectory, attempt, epoch), lease in leases.items():
        if trajectory not in cancelled:
            attempts[trajectory, attempt].append((epoch, lease))
    total = 0
    for rows in attempts.values():
        ordered = [lease for _, lease in sorted(rows, key=lambda r: r[0])]
        acknowledged = 0
        for lease, following in zip(ordered, [*ordered[1:], None], strict=True):
            acknowledged += lease.acknowledged
            if lease.how in CRASH_ENDS:
                known = following.kept if following is not None and following.started else acknowledged
                total += max(0, lease.generated - known)
    return total


def _resumed(archive: Archive, leases: dict[LeaseKey, Lease]) -> tuple[int, int]:
    """Preemptions after which the trajectory was leased again, and how many of these on another worker."""
    who = {(trajectory, epoch): lease.who for (trajectory, _, epoch), lease in leases.items() if lease.started}
    waiting: dict[str, int] = {}
    epoch: dict[str, int] = defaultdict(int)
    resumed = elsewhere = 0
    for event in archive.events:
        if event.kind != "TRAJECTORY":
            continue
        if event.to_state == "LEASED" and event.from_state == "QUEUED":
            epoch[event.name] += 1
            if event.name in waiting:
                resumed += 1
                before, now = who.get((event.name, waiting.pop(event.name))), who.get((event.name, epoch[event.name]))
                elsewhere += before is not None and now is not None and before != now
        elif event.from_state == "LEASED" and event.to_state == "QUEUED" and event.code == "PREEMPTED":
            waiting[event.name] = epoch[event.name]
    return resumed, elsewhere


def moved(archive: Archive) -> set[str]:
    """Trajectories that were leased more than once: preempted, moved, or taken over after a crash."""
    epochs: dict[str, set[int]] = defaultdict(set)
    for trajectory, _, epoch in read_leases(archive):
        epochs[trajectory].add(epoch)
    from_events = {
        e.name for e in archive.events if e.kind == "TRAJECTORY" and (e.from_state, e.to_state) == ("LEASED", "QUEUED")
    }
    return from_events | {name for name, seen in epochs.items() if len(seen) > 1}
