"""Runs: creation, admission of groups from clients or from a task file, and their end."""

import json
import random
from dataclasses import dataclass

from services.common import errors, wire
from services.common.blobs import BlobStore
from services.scheduler.control import trajectories
from services.scheduler.control.ledger import Change, Ledger
from services.scheduler.core.lifecycle import RUN, TRAJECTORY
from services.scheduler.core.model import Group, Lineage, Run, WeightVersion

MAX_TASK_BYTES = 16 << 10
MAX_TASK_LINES = 1_000_000
FOREVER = 2_000_000_000


@dataclass(frozen=True, slots=True)
class TaskFile:
    """The tasks of a run's task file, one JSON text a line."""

    lines: tuple[str, ...]


def read_tasks(blobs: BlobStore, ref: wire.BlobRef) -> TaskFile:
    """Reads and checks a task file; INVALID_FIELD names the first bad line."""
    try:
        text = blobs.get(ref).decode("utf-8", errors="strict")
    except UnicodeDecodeError as error:
        raise errors.invalid_field(f"{ref.uri}: not UTF-8 at byte {error.start}; a task file is JSON lines") from None
    lines = [line for line in text.split("\n") if line.strip()]
    if not lines:
        raise errors.invalid_field(f"{ref.uri}: the task file has no tasks; expected one JSON object a line")
    if len(lines) > MAX_TASK_LINES:
        raise errors.invalid_field(f"{ref.uri}: {len(lines)} tasks; at most {MAX_TASK_LINES} are read")
    for number, line in enumerate(lines, 1):
        check_task(line, f"{ref.uri}:{number}")
    return TaskFile(tuple(lines))


def check_task(text: str, where: str) -> None:
    """INVALID_FIELD unless `text` is a JSON object of bounded size."""
    if len(text.encode()) > MAX_TASK_BYTES:
        raise errors.invalid_field(f"{where}: the task has {len(text.encode())} bytes; at most {MAX_TASK_BYTES}")
    try:
        task = json.loads(text)
    except ValueError as error:
        raise errors.invalid_field(f"{where}: the task is not valid JSON: {error}") from None
    except RecursionError:
        raise errors.invalid_field(f"{where}: the task's JSON is nested too deeply") from None
    if not isinstance(task, dict):
        raise errors.invalid_field(f"{where}: a task is a JSON object, found {type(task).__name__}")


def create(ledger: Ledger, run: Run, change: Change) -> None:
    """Adds a run with its first lineage and version 0, the base model, which is there from the start."""
    fleet = ledger.fleet
    fleet.runs[run.name] = run
    change.put(run)
    change.record("RUN", run.name, "", run.state, "CREATED", f"{run.kind} run, groups of {run.group_size}")
    policy = run.trainable_policy or "default"
    lineage = Lineage(f"{run.name}/policies/{policy}/lineages/1", run.name, run.trainable_policy, 1)
    version = WeightVersion(
        name=f"{lineage.name}/versions/0",
        run=run.name,
        policy=run.trainable_policy,
        lineage=1,
        number=0,
        state="PUBLISHED",
        commit_time=change.now,
        publish_time=change.now,
    )
    fleet.lineages[lineage.name] = lineage
    fleet.versions[version.name] = version
    change.put(lineage, version)
    change.record("WEIGHT_VERSION", version.name, "", version.state, "BASE_MODEL", run.model[:200])


def admit(change: Change, run: Run, task: wire.Task, priority: int, line: int = -1) -> Group:
    """Admits one prompt: a group with its members, queued."""
    number = run.next_admission
    run.next_admission += 1
    group = Group(
        name=f"{run.name}/groups/{number}",
        run=run.name,
        admission_number=number,
        task=task.SerializeToString(),
        priority=priority,
        task_line=line,
        create_time=change.now,
    )
    change.fleet.groups[group.name] = group
    limits = wire.Run.FromString(run.spec).limits
    for _ in range(run.group_size + limits.oversample):
        trajectories.add_member(change, run, group)
    change.put(group, run)
    change.record("GROUP", group.name, "", "OPEN", "ADMITTED", f"{len(group.members)} members")
    return group


def admit_from_file(change: Change, run: Run, tasks: TaskFile, count: int) -> int:
    """Admits the next `count` tasks of the run's file; the cursor moves in the same change. Returns how many."""
    admitted = 0
    while admitted < count and not run.exhausted:
        line = _line_at(run, len(tasks.lines))
        admit(change, run, wire.Task(id=f"line-{line}", json=tasks.lines[line]), 0, line)
        admitted += 1
        run.cursor_position += 1
        if run.cursor_position >= len(tasks.lines):
            run.cursor_position, run.cursor_epoch = 0, run.cursor_epoch + 1
            if run.cursor_epoch >= run.task_epochs:
                run.exhausted = True
    if admitted:
        change.put(run)
    return admitted


def _line_at(run: Run, lines: int) -> int:
    """Line that the cursor points at: the file's order, or the epoch's shuffle, a pure function of the run's seed."""
    if not run.task_shuffle:
        return run.cursor_position
    order = list(range(lines))
    random.Random(f"{run.seed}/{run.cursor_epoch}").shuffle(order)  # noqa: S311 - reproducible order, not secrecy
    return order[run.cursor_position]


def in_flight(ledger: Ledger, run: Run) -> int:
    """Trajectories of the run that are admitted and not terminal."""
    return sum(t.run == run.name and t.state not in TRAJECTORY.terminal for t in ledger.fleet.trajectories.values())


def finish_if_done(change: Change, run: Run) -> bool:
    """Finishes a run whose tasks are exhausted and whose trajectories are all terminal."""
    if run.state != "ACTIVE" or not run.exhausted or in_flight(change.ledger, run):
        return False
    if any(m.run == run.name and m.state == "TAKEN" for m in change.fleet.manifests.values()):
        return False
    change.move(RUN, run, "finish", "TASKS_DONE", f"all {run.next_admission} groups are done")
    return True
