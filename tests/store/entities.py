"""Entities for tests: arbitrary ones drawn from a class's field types, and a small whole world."""

import types
from dataclasses import fields, is_dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from services.scheduler.core.model import (
    Accelerator,
    Answer,
    Attempt,
    Command,
    Entity,
    Event,
    Fleet,
    Group,
    Lineage,
    Manifest,
    MaskedSpan,
    Node,
    Plan,
    Reassignment,
    Replica,
    Run,
    Segment,
    Sequence,
    Session,
    Source,
    Span,
    Target,
    Trajectory,
    Turn,
    WeightVersion,
    Worker,
)
from services.scheduler.store.mapping import persisted
from services.scheduler.store.unit import Unit

INTEGERS = st.integers(-(2**63), 2**63 - 1)
REALS = st.floats(allow_nan=False)
NUMBERS = st.floats(allow_nan=False) | st.integers(-(2**53), 2**53)
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40)


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Any value of a field's type."""
    simple = {str: TEXTS, int: INTEGERS, float: REALS, bool: st.booleans(), bytes: st.binary(max_size=64)}
    if hint in simple:
        return simple[hint]
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return st.one_of(*(st.none() if a is type(None) else values(a) for a in arguments))
    if origin is dict:
        return st.dictionaries(values(arguments[0]), values(arguments[1]), max_size=4)
    if origin is list:
        return st.lists(values(arguments[0]), max_size=4)
    if origin is tuple and arguments[1:] == (...,):
        item = st.tuples(TEXTS, NUMBERS) if get_origin(arguments[0]) is tuple else values(arguments[0])
        return st.lists(item, max_size=4).map(tuple)
    if is_dataclass(hint):
        return instances(hint)
    raise TypeError(f"no values for {hint}")


def instances(cls: type[Any], kept: tuple[str, ...] | None = None) -> st.SearchStrategy[Any]:
    """Any instance whose fields outside `kept` have their defaults."""
    hints = get_type_hints(cls)
    names = [f.name for f in fields(cls)] if kept is None else kept
    return st.builds(cls, **{name: values(hints[name]) for name in names})


def unsaved(entity: Any) -> Any:
    """The names of an entity's fields that the database does not keep."""
    return {f.name for f in fields(entity)} - set(persisted(type(entity)))


RUN, GROUP, LOST = "runs/a", "runs/a/groups/0", "runs/a/trajectories/1-0"
MEMBERS = ["runs/a/trajectories/0-0", "runs/a/trajectories/0-1"]
MANIFEST = "runs/a/manifests/1-9"
VERSION = "runs/a/policies/default/lineages/1/versions/1"


def world() -> list[Entity]:
    """One or more of everything, none of it ended, and names that refer to each other."""
    trajectories = [
        Trajectory(
            name, RUN, GROUP, i, 0, state="BATCHED", reward=[0.1, None][i], failures={"WORKER": 2}, manifest=MANIFEST
        )
        for i, name in enumerate(MEMBERS)
    ]
    registered: list[Entity] = []
    for name in MEMBERS:
        registered += [
            Attempt(name, 1, leases=1, failure="ENGINE"),
            Attempt(name, 2, leases=2),
            Sequence(name, 2, 0),
            Sequence(name, 2, 1, parent=0, fork_position=3, fork_reason="COMPACTION", actor="sub"),
            # registered out of the order of their keys, as two sequences grow at once
            Segment(name, 2, 1, 3, 2, 2, "b" * 64, b"sb", [Span(1, 0, 3, 2, 2)]),
            Segment(name, 2, 0, 0, 5, 3, "a" * 64, b"sa", [Span(1, 0, 0, 2, 2), Span(1, 1, 2, 3, 1)]),
            Segment(name, 2, 1, 5, 4, 4, "c" * 64, b"sc", [Span(1, 1, 5, 4, 4)]),
            Turn(name, 2, 1, 0, 5, "STOP", False, b"t1"),
            Turn(name, 2, 0, 1, 7, "", False, b"t0"),
        ]
    return [
        Worker("workers/r1", "ROLLOUT", epoch=2, accelerators=("nodes/n0/accelerators/1",), features=("kv", "lora")),
        Session("workers/r1/sessions/1", "workers/r1", 1, state="FENCED", acked_answer=b"\x00\xff"),
        Session("workers/r1/sessions/2", "workers/r1", 2, request_id="u", ttl=2.5, acked_seq=4),
        Node("nodes/n0", host_memory_bytes=2**40),
        Accelerator("nodes/n0/accelerators/1", generation=3, replicas=("replicas/r-3",), cpu_share=0.45),
        Replica(
            "replicas/r-3", 3, "ROLLOUT", ("nodes/n0/accelerators/1",), "workers/r1", state="ACTIVE",
            owner_session="workers/r1/sessions/2", runs=(RUN,), positional_seed=True,
        ),
        Reassignment(
            "reassignments/x", state="DRAINING", sources=[Source("replicas/r-3", 3, True)],
            targets=[Target("replicas/t-4", "TRAINER", ("nodes/n0/accelerators/1",), "workers/t1", 4, runs=(RUN,))],
            create_time=5.0,
        ),
        Command("commands/c", "workers/r1/sessions/2", "workers/r1", "preempt", MEMBERS[0], b"\x01", 1, create_time=6),
        Run(RUN, "TRAIN", b"spec", seed=-(2**63), task_blob=b"blob", head=1),
        Lineage("runs/a/policies/default/lineages/1", RUN, "", 1, head=1),
        WeightVersion("runs/a/policies/default/lineages/1/versions/0", RUN, "", 1, 0, state="PUBLISHED"),
        WeightVersion(VERSION, RUN, "", 1, 1, manifest=MANIFEST, files=b"f"),
        Group(GROUP, RUN, 0, b"task", state="BATCHED", members=MEMBERS, manifest=MANIFEST),
        Group("runs/a/groups/1", RUN, 1, b"task", members=[LOST]),
        *trajectories,
        Trajectory(LOST, RUN, "runs/a/groups/1", 0, 1, state="VOID"),
        Trajectory("runs/a/trajectories/free", RUN, "", 0, 2),
        *registered,
        Manifest(
            MANIFEST, RUN, "", 1, 1, 0, groups=[GROUP], members=MEMBERS, attempts=[2, 2],
            masked=[MaskedSpan(MEMBERS[0], 0, 0, 2)], trainable_tokens=13, members_sha256="d" * 64,
        ),
        Plan("plans/p", "APPLIED", b"plan", 7.0),
    ]  # fmt: skip


def add(fleet: Fleet, entity: Entity) -> None:
    """Puts an entity where the fleet keeps its kind."""
    by_attempt = {Sequence: fleet.sequences, Segment: fleet.segments, Turn: fleet.turns}
    by_name: dict[type[Any], dict[str, Any]] = {
        Worker: fleet.workers,
        Session: fleet.sessions,
        Node: fleet.nodes,
        Accelerator: fleet.accelerators,
        Replica: fleet.replicas,
        Reassignment: fleet.reassignments,
        Command: fleet.commands,
        Run: fleet.runs,
        Lineage: fleet.lineages,
        WeightVersion: fleet.versions,
        Group: fleet.groups,
        Trajectory: fleet.trajectories,
        Manifest: fleet.manifests,
        Plan: fleet.plans,
    }
    if isinstance(entity, Attempt):
        fleet.attempts[entity.trajectory, entity.number] = entity
    elif isinstance(entity, Sequence | Segment | Turn):
        by_attempt[type(entity)].setdefault((entity.trajectory, entity.attempt), []).append(entity)
    else:
        by_name[type(entity)][entity.name] = entity


def sealed(*entities: Entity | Event | Answer, revision: int = 0, next_generation: int = 1) -> Unit:
    """A unit with all of these."""
    unit = Unit()
    for entity in entities:
        if isinstance(entity, Event):
            unit.event(entity)
        elif isinstance(entity, Answer):
            unit.answer(entity)
        else:
            unit.put(entity)
    if revision:
        unit.counters(revision=revision, next_generation=next_generation)
    unit.seal()
    return unit


def event(revision: int, index: int = 0, name: str = RUN, kind: str = "RUN", to_state: str = "ACTIVE") -> Event:
    """An event with only what the tests look at."""
    return Event(revision, index, 1.5, 1, kind, name, "", to_state)
