"""What happens to trajectories and their groups: progress, ends, failures, closing. All rules of admission order apply
elsewhere; here is only what a report or a lost lease leads to.
"""

from collections.abc import Sequence as Many
from dataclasses import dataclass

from services.common import errors, log
from services.scheduler.control import commands
from services.scheduler.control.ledger import Change
from services.scheduler.control.specs import failure_rule, spec
from services.scheduler.core.lifecycle import GROUP, RUN, TRAJECTORY
from services.scheduler.core.model import Attempt, Group, Run, Segment, Sequence, Trajectory, Turn

_log = log.get(__name__)

MAX_REVOKED = 4_096
"""Names told to a session as no longer its own; an older worker state is corrected by a complete answer."""


@dataclass(frozen=True, slots=True)
class ToolReturn:
    """A tool's answer, as the estimator sees it."""

    turn: int
    tool: str
    payload_class: str
    outcome: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Progress:
    """New turns and segments of one trajectory, already validated in form."""

    trajectory: str
    attempt: int
    lease_epoch: int
    turns: Many[Turn] = ()
    sequences: Many[Sequence] = ()
    segments: Many[Segment] = ()
    tool_sessions: bytes | None = None
    tool_returns: Many[ToolReturn] = ()
    prompt_tokens: int = 0
    """Prompt tokens of the first turn of each new root sequence."""
    engine_seconds: float = 0.0
    in_tool_wait: bool = False


@dataclass(frozen=True, slots=True)
class End:
    """A worker's word that an attempt is over: exactly one of reward, failure, interrupted."""

    trajectory: str
    attempt: int
    lease_epoch: int
    reward: float | None = None
    reward_record: bytes = b""
    failure: str = ""
    code: str = ""
    text: str = ""
    interrupted: str = ""


def leased_to(change: Change, session: str, name: str, attempt: int, lease_epoch: int) -> Trajectory:
    """The trajectory if this session holds exactly this lease of it; STALE_ATTEMPT otherwise (and counted)."""
    trajectory = change.fleet.trajectories.get(name)
    if (
        trajectory is not None
        and trajectory.state == "LEASED"
        and trajectory.holder == session
        and trajectory.attempt == attempt
        and trajectory.lease_epoch == lease_epoch
    ):
        return trajectory
    run = change.fleet.runs.get(name.partition("/trajectories/")[0])
    if run is not None:
        run.stale_attempts += 1
        change.put(run)
    now = (
        f"it is {trajectory.state}, attempt {trajectory.attempt}, lease {trajectory.lease_epoch}"
        if trajectory
        else "it is over or unknown"
    )
    raise errors.stale_attempt(
        f"{name}: attempt {attempt}, lease {lease_epoch} of {session} is not current: {now}", resource=name
    )


def progress(change: Change, session: str, report: Progress) -> Trajectory:
    """Registers turns and segments. Acknowledged means: kept whatever happens next. Repetitions are ignored."""
    trajectory = leased_to(change, session, report.trajectory, report.attempt, report.lease_epoch)
    key = (trajectory.name, trajectory.attempt)
    fleet = change.fleet
    known_turns = {(t.index, t.part): t for t in fleet.turns.get(key, [])}
    known_sequences = {s.index: s for s in fleet.sequences.get(key, [])}
    ends, shas = _extents(fleet.segments.get(key, []))
    run = fleet.runs[trajectory.run]
    turns, sequences, segments = [], [], []
    for turn in report.turns:
        old = known_turns.get((turn.index, turn.part))
        if old is None:
            turns.append(turn)
            known_turns[turn.index, turn.part] = turn
        elif old.record != turn.record:
            raise errors.already_exists(trajectory.name, f"turn {turn.index} part {turn.part} with other content")
    for sequence in report.sequences:
        if sequence.index not in known_sequences:
            sequences.append(sequence)
            known_sequences[sequence.index] = sequence
    for segment in report.segments:
        position = (segment.sequence, segment.first_position)
        if position in shas:
            if shas[position] != segment.sha256:
                raise errors.already_exists(trajectory.name, f"a segment at {position} with another hash")
            continue
        if segment.sequence not in known_sequences:
            raise errors.invalid_field(f"{trajectory.name}: segment of the undeclared sequence {segment.sequence}")
        expected = ends.get(segment.sequence, known_sequences[segment.sequence].fork_position)
        if segment.first_position != expected:
            raise errors.invalid_field(
                f"{trajectory.name}: segment of sequence {segment.sequence} starts at {segment.first_position}; "
                f"expected {expected}: segments follow one another without gap or overlap",
                resource=trajectory.name,
            )
        for span in segment.spans:
            # a version that was never made would pass for a fresh one
            if run.kind == "TRAIN" and (span.lineage != run.lineage or span.number > run.head):
                raise errors.invalid_field(
                    f"{trajectory.name}: tokens of version {span.lineage}-{span.number}; {run.name} is at "
                    f"{run.lineage}-{run.head}",
                    resource=trajectory.name,
                )
        ends[segment.sequence] = segment.first_position + segment.tokens
        shas[position] = segment.sha256
        segments.append(segment)
    fleet.turns.setdefault(key, []).extend(turns)
    fleet.sequences.setdefault(key, []).extend(sequences)
    fleet.segments.setdefault(key, []).extend(segments)
    trajectory.prompt_tokens += report.prompt_tokens if turns else 0
    for turn in turns:
        trajectory.generated_tokens += turn.generated_tokens
        change.ledger.generated[trajectory.run] += turn.generated_tokens
        if turn.finish:
            trajectory.turns_done += 1
            trajectory.finish, trajectory.truncated = turn.finish, trajectory.truncated or turn.truncated
    total = 0
    for segment in segments:
        total += segment.tokens
        trajectory.trainable_tokens += segment.trainable_tokens
        for span in segment.spans:
            if span.trainable_tokens and span.lineage == run.lineage:
                oldest = trajectory.oldest_version
                trajectory.oldest_version = span.number if oldest < 0 else min(oldest, span.number)
                trajectory.oldest_lineage = span.lineage
    trajectory.observation_tokens += max(
        0, total - sum(t.generated_tokens for t in turns) - (report.prompt_tokens if turns else 0)
    )
    if report.tool_sessions is not None:
        trajectory.tool_sessions = report.tool_sessions
    trajectory.in_tool_wait = report.in_tool_wait
    trajectory.progress_at = change.at
    change.put(trajectory, *turns, *sequences, *segments)
    return trajectory


def _extents(segments: Many[Segment]) -> tuple[dict[int, int], dict[tuple[int, int], str]]:
    ends: dict[int, int] = {}
    shas: dict[tuple[int, int], str] = {}
    for segment in segments:
        ends[segment.sequence] = max(ends.get(segment.sequence, 0), segment.first_position + segment.tokens)
        shas[segment.sequence, segment.first_position] = segment.sha256
    return ends, shas


def end(change: Change, session: str, report: End) -> Trajectory:
    """An attempt is over: scored, failed, or given back with its tokens."""
    trajectory = leased_to(change, session, report.trajectory, report.attempt, report.lease_epoch)
    run = change.fleet.runs[trajectory.run]
    if report.interrupted:
        trajectory.preempted += 1
        requeue(change, trajectory, report.interrupted, f"given back by {trajectory.worker} with its tokens kept")
    elif report.failure:
        fail(change, trajectory, report.failure, report.code, report.text, told=True)
    elif run.kind == "TRAIN" and trajectory.trainable_tokens == 0:
        # an empty success is an engine's failure; padded with a made-up token it would be trained on
        fail(
            change,
            trajectory,
            "ENGINE",
            "EMPTY_TRAJECTORY",
            "ended with a reward but without a trainable token",
            told=True,
        )
    else:
        _close_lease(change, trajectory)
        trajectory.reward, trajectory.reward_record = report.reward, report.reward_record
        change.move(TRAJECTORY, trajectory, "score", "SCORED", f"{trajectory.generated_tokens} tokens generated")
        _end_attempt(change, trajectory, "", "", "")
        settle_group(change, change.fleet.groups[trajectory.group])
    return trajectory


def requeue(change: Change, trajectory: Trajectory, code: str, text: str) -> None:
    """Takes the lease away and queues the trajectory again with all acknowledged tokens."""
    _revoke(change, trajectory)
    _close_lease(change, trajectory)
    trajectory.queued_at = change.at
    change.move(
        TRAJECTORY, trajectory, "requeue", code, text,
        {"kept_tokens": trajectory.generated_tokens, "lease_epoch": trajectory.lease_epoch},
    )  # fmt: skip


def fail(change: Change, trajectory: Trajectory, failure: str, code: str, text: str, *, told: bool = False) -> None:
    """A lease ended badly. The run's rules say what follows; infrastructure never becomes a reward."""
    run = change.fleet.runs[trajectory.run]
    action, allowed = failure_rule(run, failure)
    trajectory.failures[failure] = trajectory.failures.get(failure, 0) + 1
    if trajectory.failures[failure] >= allowed and action != "PAUSE_RUN":
        action, text = "VOID", f"{text} ({failure} for the {trajectory.failures[failure]}. time; {allowed} are allowed)"
    if not told:
        _revoke(change, trajectory)
    if action in ("VOID", "PAUSE_RUN"):
        _close_lease(change, trajectory)
        _end_attempt(change, trajectory, failure, code, text)
        void(change, trajectory, code or failure, text)
        if action == "PAUSE_RUN" and run.state == "ACTIVE":
            change.move(RUN, run, "pause", code or failure, f"{trajectory.name}: {text}")
        return
    _close_lease(change, trajectory)
    if action == "RETRY" or (action == "RESUME_OR_RETRY" and failure == "ENGINE" and not trajectory.generated_tokens):
        _end_attempt(change, trajectory, failure, code, text)
        _new_attempt(trajectory)
    trajectory.queued_at = change.at
    change.move(
        TRAJECTORY, trajectory, "requeue", code or failure, text,
        {"kept_tokens": trajectory.generated_tokens, "failures": trajectory.failures[failure]},
    )  # fmt: skip


def _new_attempt(trajectory: Trajectory) -> None:
    trajectory.attempt += 1
    trajectory.tokens_spent += trajectory.generated_tokens
    trajectory.prompt_tokens = trajectory.generated_tokens = trajectory.trainable_tokens = 0
    trajectory.observation_tokens = trajectory.turns_done = 0
    trajectory.oldest_version, trajectory.finish, trajectory.truncated = -1, "", False
    trajectory.tool_sessions = b""


def _close_lease(change: Change, trajectory: Trajectory) -> None:
    trajectory.run_seconds += change.at - trajectory.leased_at
    trajectory.holder = ""
    trajectory.in_tool_wait = False


def _revoke(change: Change, trajectory: Trajectory) -> None:
    """Tells the holder, if it still listens, that the trajectory is no longer its own."""
    session = change.fleet.sessions.get(trajectory.holder)
    if session is None or session.state not in ("ALIVE", "RECOVERING"):
        return
    session.desired_revision += 1
    names = change.ledger.revoked.by_session.setdefault(session.name, [])
    names.append((session.desired_revision, trajectory.name))
    del names[:-MAX_REVOKED]
    change.put(session)


def _end_attempt(change: Change, trajectory: Trajectory, failure: str, code: str, text: str) -> None:
    attempt = change.fleet.attempts.get((trajectory.name, trajectory.attempt))
    if attempt is None:
        attempt = Attempt(trajectory.name, trajectory.attempt, start_time=change.now)
        change.fleet.attempts[trajectory.name, trajectory.attempt] = attempt
    attempt.failure, attempt.reason_code, attempt.reason_text, attempt.end_time = failure, code, text, change.now
    change.put(attempt)


def void(change: Change, trajectory: Trajectory, code: str, text: str) -> None:
    """Lost to infrastructure: in no statistic. The run's rule decides about the group."""
    change.move(TRAJECTORY, trajectory, "void", code, text)
    group = change.fleet.groups[trajectory.group]
    run = change.fleet.runs[trajectory.run]
    if group.state != "OPEN":
        return
    policy = spec(run).void_policy
    most = policy.max_replacements or run.group_size
    if policy.action in (0, 1) and group.replacements < most:  # UNSPECIFIED is read as REPLACE
        group.replacements += 1
        add_member(change, run, group)
        change.put(group)
    elif policy.action == 2 and _could_reach(change, group) >= max(1, policy.min_members):  # SHRINK
        settle_group(change, group)
    else:
        drop_group(change, group, "filter", "GROUP_DROPPED", f"{trajectory.name} was lost: {text}")


def _could_reach(change: Change, group: Group) -> int:
    members = (change.fleet.trajectories[m] for m in group.members)
    return sum(m.state in ("QUEUED", "LEASED", "SCORED") for m in members)


def add_member(change: Change, run: Run, group: Group) -> Trajectory:
    """A new trajectory of the group, queued."""
    sample = len(group.members)
    trajectory = Trajectory(
        name=f"{run.name}/trajectories/{group.admission_number}-{sample}",
        run=run.name,
        group=group.name,
        sample=sample,
        admission_number=group.admission_number,
        create_time=change.now,
        queued_at=change.at,
    )
    change.fleet.trajectories[trajectory.name] = trajectory
    group.members.append(trajectory.name)
    change.put(trajectory)
    change.record("TRAJECTORY", trajectory.name, "", "QUEUED", "ADMITTED", "")
    return trajectory


def settle_group(change: Change, group: Group) -> None:
    """Closes the group when enough members are scored and nothing it waits for can still come."""
    if group.state != "OPEN":
        return
    fleet, run = change.fleet, change.fleet.runs[group.run]
    members = [fleet.trajectories[m] for m in group.members]
    scored = [m for m in members if m.state == "SCORED"]
    waiting = [m for m in members if m.state in ("QUEUED", "LEASED")]
    wanted = run.group_size
    policy = spec(run).void_policy
    if policy.action == 2:  # SHRINK: those lost are not waited for
        wanted = min(wanted, max(1, policy.min_members, len(scored) + len(waiting)))
    if len(scored) < wanted:
        return
    for surplus in waiting:
        cancel(change, surplus, "SURPLUS", f"{group.name} has its {wanted} members")
    if run.kind != "TRAIN":
        for member in scored:
            change.move(TRAJECTORY, member, "deliver", "DELIVERED", "")
        change.move(GROUP, group, "finish", "ALL_MEMBERS_SCORED", f"{len(scored)} members have a reward")
        group.close_time = change.now
        forget_group(change, group)
        return
    for member in scored:
        change.move(TRAJECTORY, member, "close_group", "GROUP_CLOSED", "")
    group.close_time = change.now
    change.move(GROUP, group, "close", "ALL_MEMBERS_SCORED", f"{len(scored)} of {wanted} members have a reward")
    if spec(run).filter.HasField("min_reward_spread"):
        rewards = [m.reward or 0.0 for m in scored]
        spread, least = max(rewards) - min(rewards), spec(run).filter.min_reward_spread
        if spread <= least:
            text = f"rewards differ by {spread:g}, no more than {least:g}: no signal"
            drop_group(change, group, "filter", "NO_SIGNAL", text)


def drop_group(change: Change, group: Group, event: str, code: str, text: str) -> None:
    """Ends a group without training: scored members by `event` (filter, go_stale), the others cancelled."""
    for name in group.members:
        member = change.fleet.trajectories[name]
        if TRAJECTORY.allows(member.state, event):
            if member.state == "LEASED":
                commands.cancel(change, member, code=code, text=text)
                _revoke(change, member)
                _close_lease(change, member)
            change.move(TRAJECTORY, member, event, code, text)
        elif member.state in ("QUEUED", "LEASED"):
            cancel(change, member, code, text)
    change.move(GROUP, group, "finish", code, text)
    forget_group(change, group)


def cancel(change: Change, trajectory: Trajectory, code: str, text: str) -> None:
    """Ends one for good."""
    if trajectory.state == "LEASED":
        commands.cancel(change, trajectory, code=code, text=text)
        _revoke(change, trajectory)
        _close_lease(change, trajectory)
    change.move(TRAJECTORY, trajectory, "cancel", code, text)


def after_cancel(change: Change, group: Group) -> None:
    """A group whose members were cancelled by hand: closed if enough are scored, done if nothing can come."""
    settle_group(change, group)
    if group.state == "OPEN" and not _could_reach(change, group):
        drop_group(change, group, "filter", "CANCELLED", "all members were cancelled")
    elif group.state == "OPEN" and _could_reach(change, group) < change.fleet.runs[group.run].group_size:
        drop_group(change, group, "filter", "CANCELLED", "too few members are left")


def forget_group(change: Change, group: Group) -> None:
    """Drops a finished group from memory once this change is committed; the store keeps it."""
    change.ledger.forget.append(group.name)
