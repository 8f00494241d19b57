"""The record: ordered, paged without gap or repetition, pruned from its old end only."""

import pytest

from services.common.errors import LibraError
from services.scheduler.core.model import Answer
from services.scheduler.store import events as record
from services.scheduler.store import store as module
from services.scheduler.store.store import Store
from services.scheduler.store.writer import Writer
from tests.store import entities

SIZES = (1, 3, 1, 7, 2)
"""Events of the revisions 1, 2 ..."""


@pytest.fixture
async def recorded(writer: Writer) -> list[tuple[int, int]]:
    """Places of events that were written."""
    for revision, size in enumerate(SIZES, 1):
        unit = entities.sealed(*(entities.event(revision, index) for index in range(size)), revision=revision)
        await writer.submit(unit)
    return [(revision, index) for revision, size in enumerate(SIZES, 1) for index in range(size)]


def places(found: list[entities.Event]) -> list[tuple[int, int]]:
    """Where the events stand."""
    return [(event.revision, event.index) for event in found]


async def test_order(store: Store, recorded: list[tuple[int, int]]) -> None:
    assert places(await store.events(0, 100)) == recorded
    assert places(await store.events(2, 100)) == [p for p in recorded if p[0] > 2]
    assert places(await store.events(0, 100, up_to_revision=3)) == [p for p in recorded if p[0] <= 3]
    assert await store.events(5, 100) == []


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
async def test_pages_join_without_gap(size: int, store: Store, recorded: list[tuple[int, int]]) -> None:
    found: list[tuple[int, int]] = []
    after = (0, record.LAST_INDEX)
    while page := places(await store.events(after[0], size, after_index=after[1])):
        assert len(page) <= size
        found += page
        after = page[-1]
    assert found == recorded


async def test_filters(store: Store, writer: Writer) -> None:
    await writer.submit(
        entities.sealed(
            entities.event(1, 0, "runs/a", "RUN", "ACTIVE"),
            entities.event(1, 1, "runs/ab", "RUN", "ACTIVE"),
            entities.event(1, 2, "runs/a/groups/1", "GROUP", "OPEN"),
            entities.event(1, 3, "runs/a/groups/10", "GROUP", "DONE"),
            entities.event(1, 4, "runs/a0", "RUN", "PAUSED"),
            revision=1,
        )
    )

    async def found(**conditions: object) -> list[int]:
        return [event.index for event in await store.events(0, 100, **conditions)]

    assert await found(name_prefix="runs/a") == [0, 2, 3]
    assert await found(name_prefix="runs/a/") == [2, 3]
    assert await found(name_prefix="runs/a/groups/1") == [2]
    assert await found(kinds=("GROUP",)) == [2, 3]
    assert await found(kinds=("GROUP", "RUN"), states=("DONE", "PAUSED")) == [3, 4]
    assert await found(kinds=("GROUP",), states=("PAUSED",)) == []


async def test_newest_of_one_resource(store: Store, writer: Writer) -> None:
    for revision in range(1, 6):
        mine, other = entities.event(revision, 0, "runs/a"), entities.event(revision, 1, "runs/b")
        await writer.submit(entities.sealed(mine, other, revision=revision))
    assert places(await store.events_of("runs/a", 3)) == [(5, 0), (4, 0), (3, 0)]


async def test_old_events_are_pruned_in_whole_revisions(store: Store, recorded: list[tuple[int, int]]) -> None:
    # the 5 newest events reach into revision 4, which stays whole
    assert await store.prune(0.0, max_events=5) == 5
    assert await store.compacted_revision() == 3
    assert places(await store.events(3, 100)) == [p for p in recorded if p[0] > 3]
    assert places(await store.events(0, 100)) == [p for p in recorded if p[0] > 3]
    assert await store.prune(0.0, max_events=5) == 0


async def test_a_reader_behind_the_pruned_is_told(store: Store, recorded: list[tuple[int, int]]) -> None:
    await store.prune(0.0, max_events=5)
    with pytest.raises(LibraError) as refusal:
        await store.events(2, 100)
    assert (refusal.value.reason, refusal.value.metadata["compacted_revision"]) == ("COMPACTED", "3")


async def test_pruning_goes_on_in_small_transactions(
    store: Store, recorded: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PRUNE_AT_ONCE", 2)
    assert await store.prune(0.0, max_events=2) == len(recorded) - 2
    assert await store.prune(0.0, max_events=2) == 0
    assert places(await store.events(4, 100)) == recorded[-2:]
    assert await store.compacted_revision() == 4


async def test_answers_are_kept_for_a_day(store: Store, writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PRUNE_AT_ONCE", 2)
    answers = [Answer(f"id-{i}", "CreateRun", "sha", b"\x00", create_time=100.0 * i) for i in range(8)]
    await writer.submit(entities.sealed(*answers))
    assert await store.prune(module.ANSWER_SECONDS + 500.0) == 5
    assert [await store.answer(a.request_id) for a in answers] == [None] * 5 + answers[5:]
