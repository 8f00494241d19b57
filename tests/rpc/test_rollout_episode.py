"""Episodes against a toy tool environment over gRPC: moved at any token they stay the same, budgets and ends hold."""

import asyncio
import dataclasses

import numpy as np
import pytest

from services.common import wire
from services.rollout import episode as episodes
from services.rollout.dialect import LibraTags
from services.rollout.engine.base import EngineLimits, Interruption, Version, Weights
from services.rollout.engine.fake import EMPTY, CharCodec, FakeCore
from services.rollout.engine.transformers import TransformersCore
from tests.support.rollout_world import ChattyTags, World, serving
from tests.support.tiny_model import write_tiny_model

CODEC = CharCodec()
CALL, END_CALL, ANS, END_ANS, EOS = (CODEC.special(t) for t in ("<call>", "</call>", "<ans>", "</ans>", "<eos>"))
LIMITS = EngineLimits(max_sequences=4, max_context=256, chunk_tokens=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "a")


@pytest.fixture
async def make_world(tmp_path):
    worlds = []

    async def make(**options):
        world = World(tmp_path / str(len(worlds)), **options)
        await world.start()
        worlds.append(world)
        return world

    yield make
    for world in worlds:
        await world.stop()


@pytest.fixture
async def make_engine():
    engines = []

    async def make(core, model="fake", **options):
        engine = await serving(core, model, **options)
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        await engine.stop()


def script(*texts):
    """A fake model that writes these turns, whatever it reads."""
    turns = [[i for p in parts for i in ([p] if isinstance(p, int) else CODEC.encode(p))] for parts in texts]
    flat = [t for turn in turns for t in turn]
    written = []

    def next_token(ids):
        written.append(1)
        return flat[min(len(written), len(flat)) - 1]

    return next_token


SCRIPT = ((CALL, "3+4", END_CALL), (CALL, "7-2", END_CALL), (ANS, "5", END_ANS, EOS))


def _abort_every(k):
    """Aborts whatever runs after each k tokens, between two tokens, from the engine's own thread."""
    state = {"engine": None, "seen": 0, "since": 0, "every": k}

    def after_step(core):
        generated = core.stats().generated_tokens
        state["since"] += generated - state["seen"]
        state["seen"] = generated
        if state["since"] >= state["every"]:
            state["since"] = 0
            for request_id in list(core._jobs if hasattr(core, "_jobs") else core._running):
                state["engine"].abort(request_id, Interruption.PREEMPTED)

    return after_step, state


@pytest.mark.parametrize(("temperature", "seed", "observation"), [(0.0, 1, "(8+8)=?"), (1.0, 3, "3+4=?")])
async def test_an_episode_moved_at_every_kth_token_equals_the_uninterrupted_one(
    folder, make_world, make_engine, temperature, seed, observation
):
    whole = await make_world(budget=36, temperature=temperature)
    whole.run.seed, whole.env.observation = seed, observation
    engine = await make_engine(TransformersCore(LIMITS), folder)
    await whole.episode(engine).run()
    assert whole.ends[0].WhichOneof("end") == "reward"
    expected = whole.columns()
    assert len(whole.env.executed) > 3, "the episode must call tools for this test to mean something"
    assert max(t.generated_tokens for t in whole.turns) > 5
    assert expected["loss_mask"].sum() == whole.generated
    hooks = [_abort_every(1), _abort_every(1)]
    engines = []
    for hook, state in hooks:
        state["engine"] = await make_engine(TransformersCore(LIMITS), folder, after_step=hook)
        engines.append(state["engine"])
    for k in (1, 2, 3, 5, 8, 13):
        for _, state in hooks:
            state["every"], state["since"] = k, 0
        moved = await make_world(budget=36, temperature=temperature)
        moved.run.seed, moved.env.observation = seed, observation
        leases = 0
        while not moved.ends or moved.ends[-1].WhichOneof("end") == "interrupted":
            place = engines[leases % 2]
            await moved.episode(place, replica=f"replicas/{leases % 2}").run()
            leases += 1
            assert leases < 200
        assert leases > 1
        assert k > 2 or any(t.part and t.generated_tokens for t in moved.turns), "a turn must have been cut"
        got = moved.columns()
        assert got["ids"].tolist() == expected["ids"].tolist()
        assert got["loss_mask"].tolist() == expected["loss_mask"].tolist()
        assert np.abs(got["logprob"] - expected["logprob"]).max() < 1e-4
        assert got["weight_version"].tolist() == expected["weight_version"].tolist()
        assert moved.env.executed == whole.env.executed, "no tool ran twice"
        assert moved.env.answers == whole.env.answers
        assert moved.ends[-1].reward.value == 0.5
        assert not any(t.finish == wire.FINISH_REASON_LENGTH for t in moved.turns if t.interruption)


async def test_what_a_segment_holds(make_world, make_engine):
    world = await make_world()
    engine = await make_engine(FakeCore(script(*SCRIPT), LIMITS))
    episode = world.episode(engine, LibraTags)
    await episode.run()
    columns = world.columns()
    tags = LibraTags(CODEC)
    reads = [tags.prompt_ids("", "3+4=?"), tags.observation_ids("3"), tags.observation_ids("3")]
    writes = [[i for p in turn for i in ([p] if isinstance(p, int) else CODEC.encode(p))] for turn in SCRIPT]
    rows = [part for pair in zip(reads, writes, strict=True) for part in pair]
    assert columns["ids"].tolist() == [i for part in rows for i in part]
    mask = [m for n, part in enumerate(rows) for m in [n % 2] * len(part)]
    assert columns["loss_mask"].tolist() == mask
    assert (columns["logprob"] == np.where(np.array(mask) == 1, np.float32(-0.5), 0)).all()
    assert (columns["weight_version"] == np.where(np.array(mask)[:, None] == 1, [[1, 0]], -1)).all()
    segments = world.sequences[0].segments
    assert [s.first_position for s in segments] == [0, 11, 19]
    for part in segments:
        assert part.trainable_tokens == sum(v.trainable_tokens for v in part.versions)
        assert {c.name: c.width for c in part.columns} == {"ids": 1, "loss_mask": 1, "logprob": 1, "weight_version": 2}
        assert part.kv_policy == wire.KV_POLICY_RECOMPUTE
        assert part.logprob_kind == wire.LOGPROB_KIND_SAMPLED
    assert world.env.answers == ["5"]
    assert world.ends[0].reward.value == 0.5
    assert world.env.closed
    assert world.env.executed == ["1-0", "1-1"]
    records = [c for t in world.turns for c in t.tool_calls]
    assert [(r.call_id, r.kind, r.outcome) for r in records] == [
        ("1-0", wire.TOOL_KIND_PURE, wire.TOOL_OUTCOME_OK),
        ("1-1", wire.TOOL_KIND_PURE, wire.TOOL_OUTCOME_OK),
    ]
    assert world.tool_sessions[0].next_call == 2
    assert [(t.index, t.part) for t in world.turns] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]
    # turn k + 1 extends turn k: its prompt is everything before it
    for turn in world.turns:
        assert turn.prompt_tokens == turn.first_position
    assert episode.ended_how == "reward"


async def test_the_turn_is_registered_before_its_tool_is_called(make_world, make_engine):
    world = await make_world()
    world.env.gate.clear()
    engine = await make_engine(FakeCore(script(*SCRIPT), LIMITS))
    task = asyncio.create_task(world.episode(engine, LibraTags).run())
    async with asyncio.timeout(10):
        await world.env.in_call.wait()
        assert [(t.index, t.finish) for t in world.turns] == [(0, wire.FINISH_REASON_TOOL_CALL)]
        assert world.generated == 5
        world.env.gate.set()
        await task


async def test_preempted_during_a_tool_call_the_call_runs_once(make_world, make_engine):
    world = await make_world()
    world.env.gate.clear()
    next_token = script(*SCRIPT)
    one = world.episode(await make_engine(FakeCore(next_token, LIMITS)), LibraTags)
    task = asyncio.create_task(one.run())
    async with asyncio.timeout(20):
        await world.env.in_call.wait()
        one.interrupt(Interruption.PREEMPTED)
        await task
        assert world.ends[-1].interrupted == wire.INTERRUPTION_PREEMPTED
        assert one.registered == 5
        world.env.gate.set()
        await world.episode(await make_engine(FakeCore(next_token, LIMITS)), LibraTags).run()
    assert world.ends[-1].WhichOneof("end") == "reward"
    assert world.env.executed == ["1-0", "1-1"]
    assert world.env.answers == ["5"]


async def test_a_tools_outcome_travels_with_the_next_turn(make_world, make_engine):
    world = await make_world()
    await world.episode(await make_engine(FakeCore(script(*SCRIPT), LIMITS)), LibraTags).run()
    reports = [[(t.index, t.part) for p in d.progress for t in p.turns] for d in world.deltas if d.progress]
    assert reports == [[(0, 0)], [(0, 1), (1, 0)], [(1, 1), (2, 0)]]


async def test_a_tools_outcome_does_not_wait_for_a_long_turn(make_world, make_engine, monkeypatch):
    monkeypatch.setattr(episodes, "RECORD_SECONDS", 0.01)
    world = await make_world()
    core = FakeCore(script(*SCRIPT), LIMITS)
    engine = await make_engine(core)
    world.env.gate.clear()
    task = asyncio.create_task(world.episode(engine, LibraTags).run())
    async with asyncio.timeout(10):
        await world.env.in_call.wait()
        engine.set_concurrency(0)  # the next turn stays in the queue
        world.env.gate.set()
        while not any(t.tool_calls for t in world.turns):
            await asyncio.sleep(0.005)
        assert [(t.index, t.part) for t in world.turns] == [(0, 0), (0, 1)]
        engine.set_concurrency(8)
        await task
    assert [(t.index, t.part) for t in world.turns] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]
    assert world.ends[-1].WhichOneof("end") == "reward"


@pytest.mark.parametrize("code", ["STALE_ATTEMPT", "INVALID_FIELD"])
async def test_a_late_outcome_that_is_refused_ends_the_episode(make_world, make_engine, monkeypatch, code):
    """As stale: dropped without a word. For its content: the attempt fails, and says so."""
    monkeypatch.setattr(episodes, "RECORD_SECONDS", 0.01)
    world = await make_world()
    engine = await make_engine(FakeCore(script(*SCRIPT), LIMITS))
    world.env.gate.clear()
    mine = world.episode(engine, LibraTags)
    report = mine._place.report

    async def refuse_records(delta: wire.Delta) -> list[wire.Refusal]:
        if any(t.tool_calls for p in delta.progress for t in p.turns) or (code == "STALE_ATTEMPT" and delta.ends):
            return [wire.Refusal(name=mine.name, reason=wire.Reason(code=code))]
        return await report(delta)

    mine._place = dataclasses.replace(mine._place, report=refuse_records)
    task = asyncio.create_task(mine.run())
    async with asyncio.timeout(10):
        await world.env.in_call.wait()
        engine.set_concurrency(0)
        world.env.gate.set()
        await task
    if code == "STALE_ATTEMPT":
        assert mine.ended_how == "dropped"
        assert not world.ends
    else:
        assert world.ends[-1].failure.reason.code == code


async def test_stop_at_the_turns_end_finishes_the_turn(make_world, make_engine):
    world = await make_world()
    engine = await make_engine(FakeCore(script(*SCRIPT), LIMITS))
    episode = world.episode(engine, LibraTags)
    task = asyncio.create_task(episode.run())
    async with asyncio.timeout(10):
        while episode.waits_for_tool:
            await asyncio.sleep(0)
        episode.interrupt(Interruption.PREEMPTED, at_turn_end=True)
        await task
    assert world.ends[-1].interrupted == wire.INTERRUPTION_PREEMPTED
    assert [(t.finish, t.interruption) for t in world.turns] == [(wire.FINISH_REASON_TOOL_CALL, 0)]
    assert world.env.executed == []


@pytest.mark.parametrize("share", [0.3, 0.7, 1.0])
async def test_case_24_a_resumed_episode_has_only_what_is_left_of_its_budget(make_world, make_engine, share):
    budget = 30
    world = await make_world(budget=budget)
    never_ends = script(("a",))
    for _ in range(6):
        wanted = max(1, int((budget - world.generated) * share))
        hook, state = _abort_every(wanted)
        state["engine"] = await make_engine(FakeCore(never_ends, LIMITS), after_step=hook)
        await world.episode(state["engine"], LibraTags).run()
        if world.ends[-1].WhichOneof("end") != "interrupted":
            break
    assert world.generated <= budget
    assert world.ends[-1].WhichOneof("end") in ("reward", "interrupted")
    if world.ends[-1].WhichOneof("end") == "reward":
        assert world.generated == budget
        assert world.turns[-1].finish == wire.FINISH_REASON_LENGTH
    assert all(not t.finish for t in world.turns if t.interruption)


async def test_case_24_turns_left_survive_a_resumption(make_world, make_engine):
    world = await make_world(turns=2, budget=500)
    next_token = script(*[(CALL, "1+1", END_CALL)] * 9)
    first = await make_engine(FakeCore(next_token, LIMITS))
    episode = world.episode(first, LibraTags)
    world.env.gate.clear()
    task = asyncio.create_task(episode.run())
    async with asyncio.timeout(10):
        await world.env.in_call.wait()
        episode.interrupt(Interruption.PREEMPTED)
        await task
        world.env.gate.set()
        await world.episode(await make_engine(FakeCore(next_token, LIMITS)), LibraTags).run()
    finished = [t for t in world.turns if t.finish]
    assert [t.finish for t in finished] == [wire.FINISH_REASON_TOOL_CALL] * 2
    assert finished[-1].truncated, "cut by the limit of turns"
    assert world.env.executed == ["1-0"]
    assert world.env.answers == [""]


async def test_case_25_preempt_in_queue_keeps_tokens(make_world, make_engine):
    """After its first turn the episode waits in the engine's queue; preempted there, all its tokens are stored."""
    world = await make_world()
    core = FakeCore(script(*SCRIPT), LIMITS)
    engine = await make_engine(core)
    world.env.gate.clear()
    episode = world.episode(engine, LibraTags)
    task = asyncio.create_task(episode.run())
    async with asyncio.timeout(10):
        await world.env.in_call.wait()
        engine.set_concurrency(0)  # what is submitted from now on stays queued
        world.env.gate.set()
        while (await engine.stats()).waiting == 0:
            await asyncio.sleep(0)
        episode.interrupt(Interruption.PREEMPTED)
        await task
    assert episode.registered == world.generated == 5
    assert world.columns()["loss_mask"].sum() == 5
    assert world.ends[-1].interrupted == wire.INTERRUPTION_PREEMPTED
    assert all(t.generated_tokens or t.tool_calls for t in world.turns)
    rest = FakeCore(script(*SCRIPT[1:]), LIMITS)
    await world.episode(await make_engine(rest), LibraTags).run()
    assert world.env.answers == ["5"]
    assert world.env.executed == ["1-0", "1-1"]


async def test_case_26_each_segment_is_tagged_by_version(folder, make_world, make_engine):
    world = await make_world(budget=30)
    box = []

    def after_step(core):
        if core.stats().generated_tokens == 7:
            core.prepare(Version(1, 1), Weights(str(folder)))
            core.switch(Version(1, 1))

    box.append(await make_engine(TransformersCore(LIMITS), folder, after_step=after_step))
    await world.episode(box[0]).run()
    columns = world.columns()
    versions = [tuple(v) for v in columns["weight_version"][columns["loss_mask"] == 1].tolist()]
    assert versions == [(1, 0)] * 7 + [(1, 1)] * (world.generated - 7)
    spans = [s for part in world.sequences[0].segments for s in part.versions]
    for span in spans:
        where = slice(span.first_position, span.first_position + span.tokens)
        assert (columns["weight_version"][where] == (span.version.lineage, span.version.number)).all()
        assert (columns["loss_mask"][where] == 1).all()
    assert sum(s.tokens for s in spans) == world.generated


class DriftingTags(LibraTags):
    """A template that rewrites what came before, as chat templates do."""

    def next_prompt(self, ids, output):
        return [*ids[:3], *self._codec.encode("*"), *ids[4:], *self.observation_ids(output)]


async def test_case_58_a_prompt_that_does_not_extend_is_a_declared_fork(make_world, make_engine):
    world = await make_world()
    core = FakeCore(script(*SCRIPT), LIMITS)
    await world.episode(await make_engine(core), DriftingTags).run()
    assert [s.index for s in world.sequences.values()] == [0, 1]
    fork = world.sequences[1]
    assert (fork.parent, fork.fork_position, fork.fork_reason) == (0, 3, wire.FORK_REASON_DRIFT)
    # the second rewrite changes nothing more, so the fork goes on
    assert [t.sequence for t in world.turns if t.finish] == [0, 1, 1]
    trained = sum(int(world.columns(i)["loss_mask"].sum()) for i in (0, 1))
    assert trained == world.generated, "each generated token is trainable once"
    # and it can be gone on with: the rebuilt ids are those the engine saw
    from services.rollout.transcript import rebuild

    transcript = rebuild(list(world.sequences.values()), world.turns, world.blobs.get)
    assert transcript.lines[1].ids[:3] == transcript.lines[0].ids[:3]
    assert transcript.line.ids[3] == ord("*")
    assert transcript.turn_ids(2)[-1] == EOS


@pytest.mark.parametrize("turns", [(), SCRIPT[:1]])
async def test_case_59_an_empty_success_is_an_engine_failure(make_world, make_engine, turns):
    """A success without a token is a failure of the engine, and no made-up token enters a segment."""
    world = await make_world()
    core = FakeCore(script(*turns, (EMPTY,)), LIMITS)
    episode = world.episode(await make_engine(core), LibraTags)
    await episode.run()
    assert world.ends[0].failure.failure == wire.FAILURE_CLASS_ENGINE
    assert world.ends[0].failure.reason.code == "EMPTY_SUCCESS"
    assert world.generated == episode.registered == 5 * len(turns)
    assert world.env.answers == []


async def test_an_engine_that_dies_fails_the_attempt_and_keeps_acknowledged_tokens(make_world, make_engine):
    world = await make_world()
    tokens = [CALL, *CODEC.encode("3+4"), END_CALL, *CODEC.encode("abcd")]

    def dies(ids):
        if not tokens:
            raise RuntimeError("out of memory")
        return tokens.pop(0)

    engine = await make_engine(FakeCore(dies, LIMITS))
    await world.episode(engine, LibraTags).run()
    assert world.ends[0].failure.failure == wire.FAILURE_CLASS_ENGINE
    assert "out of memory" in world.ends[0].failure.reason.text
    assert world.generated == 5 + 4
    assert engine.failure


async def test_case_61_a_cut_turn_stays_visible(make_world, make_engine):
    world = await make_world(budget=8)
    core = FakeCore(script((CALL, "3+4", END_CALL), ("abcdefgh",)), LIMITS)
    await world.episode(await make_engine(core), LibraTags).run()
    last = [t for t in world.turns if t.finish][-1]
    assert (last.finish, last.truncated, last.generated_tokens) == (wire.FINISH_REASON_LENGTH, True, 3)
    assert [t.truncated for t in world.turns if t.finish] == [False, True]
    assert world.env.answers == [""]


async def test_case_61_a_tool_output_that_fills_the_context_ends_the_episode_as_cut(make_world, make_engine):
    world = await make_world(budget=500)
    world.env.output = "x" * 300
    core = FakeCore(script(*SCRIPT), LIMITS)
    await world.episode(await make_engine(core), LibraTags).run()
    assert world.turns[-1].finish == wire.FINISH_REASON_LENGTH
    assert world.turns[-1].truncated
    assert world.ends[0].WhichOneof("end") == "reward"
    assert world.columns()["loss_mask"].sum() == world.generated == 5


async def test_a_prompt_longer_than_the_context_fails_that_item_alone(make_world, make_engine):
    world = await make_world()
    world.env.observation = "9" * 300
    engine = await make_engine(FakeCore(script(*SCRIPT), LIMITS))
    await world.episode(engine, LibraTags).run()
    failure = world.ends[0].failure
    assert (failure.failure, failure.reason.code) == (wire.FAILURE_CLASS_EPISODE, "PROMPT_TOO_LONG")
    assert "301 tokens" in failure.reason.text
    assert "256" in failure.reason.text
    assert not engine.failure


async def test_infrastructure_never_becomes_a_reward(make_world, make_engine):
    world = await make_world()
    world.env.outcome = wire.TOOL_OUTCOME_INFRA_ERROR
    await world.episode(await make_engine(FakeCore(script(*SCRIPT), LIMITS)), LibraTags).run()
    assert world.ends[0].failure.failure == wire.FAILURE_CLASS_ENVIRONMENT
    assert world.env.answers == []


async def test_a_short_outage_of_the_environment_is_waited_out(make_world, make_engine):
    world = await make_world()
    world.env.unavailable = 2
    await world.episode(await make_engine(FakeCore(script(*SCRIPT), LIMITS)), LibraTags).run()
    assert world.ends[0].WhichOneof("end") == "reward"


@pytest.mark.parametrize("outcome", [wire.TOOL_OUTCOME_TOOL_ERROR, wire.TOOL_OUTCOME_TIMEOUT])
async def test_the_model_reads_of_its_own_mistakes(make_world, make_engine, outcome):
    world = await make_world()
    world.env.outcome = outcome
    world.env.output = "no"
    await world.episode(await make_engine(FakeCore(script(*SCRIPT), LIMITS)), LibraTags).run()
    assert world.ends[0].WhichOneof("end") == "reward"
    text = CODEC.decode(world.columns()["ids"].tolist())
    assert text == "3+4=?3+4no7-2no5"


async def test_a_lost_lease_is_dropped_without_another_word(make_world, make_engine):
    world = await make_world()
    engine = await make_engine(FakeCore(script(*SCRIPT), LIMITS))
    episode = world.episode(engine, LibraTags)
    world.refuse = "STALE_ATTEMPT"
    await episode.run()
    assert episode.ended_how == "dropped"
    assert len(world.deltas) == 1
    assert world.ends == []
    assert (await engine.stats()).running == 0


async def test_a_gone_segment_is_data_loss(make_world, make_engine, tmp_path):
    world = await make_world()
    world.env.gate.clear()
    engine = await make_engine(FakeCore(script(*SCRIPT), LIMITS))
    episode = world.episode(engine, LibraTags)
    task = asyncio.create_task(episode.run())
    async with asyncio.timeout(10):
        await world.env.in_call.wait()
        episode.interrupt(Interruption.PREEMPTED)
        await task
    world.sequences[0].segments[0].blob.sha256 = "0" * 64
    await world.episode(engine, LibraTags).run()
    assert world.ends[-1].failure.failure == wire.FAILURE_CLASS_DATA_LOSS


async def test_the_running_time_ends_in_a_deadline_never_a_reward(make_world, make_engine):
    world = await make_world(budget=20_000_000)
    engine = await make_engine(FakeCore(script(("a",)), EngineLimits(max_context=1 << 26, chunk_tokens=64)))
    lease = world.lease()
    lease.time_left.CopyFrom(wire.duration(0.05))
    from services.rollout.episode import Episode

    await Episode(lease, world.run, lease.task.json, ChattyTags(CODEC), world.place(engine)).run()
    assert world.ends[-1].failure.failure == wire.FAILURE_CLASS_DEADLINE
    assert world.turns[-1].interruption == wire.INTERRUPTION_DEADLINE
    assert world.columns()["loss_mask"].sum() == world.generated > 0


async def test_a_worker_that_crashed_after_opening_finds_the_same_session(make_world, make_engine):
    world = await make_world()
    engine = await make_engine(FakeCore(script(*SCRIPT), LIMITS))
    first = world.episode(engine, LibraTags)
    task = asyncio.create_task(first.run())
    async with asyncio.timeout(10):
        while not world.env.sessions:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        world.turns.clear()
        world.sequences.clear()
        world.tool_sessions = []
        await world.episode(await make_engine(FakeCore(script(*SCRIPT), LIMITS)), LibraTags).run()
    assert len(world.env.sessions) == 1
    assert world.ends[-1].WhichOneof("end") == "reward"
    assert next(iter(world.env.sessions.values()))["epoch"] == 2
