"""What a faulty, hasty or hostile peer sends must neither hurt the others nor stop the scheduler."""

import asyncio
import base64
import json
import uuid
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from services.common import wire
from services.common.rpc.channel import MAX_MESSAGE_BYTES, connect
from tests.support.robots import NODE, Cluster, NodeRobot, Robot, RolloutRobot, accelerator, refused, rid, small_fleet

END_OF_INT64 = (1 << 63) - 1


async def lives(cluster) -> None:
    """A change still gets through to the store."""
    await cluster.create_run(f"alive-{uuid.uuid4().hex[:8]}", group_size=2)
    assert not cluster.scheduler.failed.is_set()


@asynccontextmanager
async def one_engine(cluster):
    """A node with one accelerator and its rollout worker: all leases are this one's."""
    async with (
        NodeRobot(cluster.address, {1: wire.POOL_CORE_ROLLOUT}) as node,
        RolloutRobot(cluster.address, "rollout-1", [1]) as robot,
    ):
        yield node, robot


async def hold(cluster, robot, tasks=('{"n": 1}',), **fields) -> list[wire.TrajectoryLease]:
    """Makes run r with a group for each task, whose episodes never end; returns the leases."""
    robot.play = lambda lease: asyncio.Event().wait()
    run = await cluster.create_run("r", **{"group_size": 2, **fields})
    request = wire.SubmitGroupsRequest(request_id=rid(), run="runs/r", tasks=[wire.Task(json=t) for t in tasks])
    await cluster.trajectories.SubmitGroups(request, timeout=5)
    await cluster.until(lambda: len(robot.leases) == len(tasks) * run.group_size)
    return list(robot.leases.values())


async def all_leases(cluster, robot) -> dict[str, wire.TrajectoryLease]:
    """What Await gives to a worker that has nothing yet, answer by answer."""
    leases: dict[str, wire.TrajectoryLease] = {}
    have, more = 0, True
    while more:
        request = wire.AwaitRequest(caller=robot.session.caller(), desired_revision=have, command_sequence=1 << 40)
        answer = await cluster.fleet.Await(request, timeout=5)
        assert answer.ByteSize() < MAX_MESSAGE_BYTES
        assert answer.desired.revision > have
        leases |= {lease.trajectory: lease for lease in answer.desired.trajectories}
        have, more = answer.desired.revision, answer.desired.more
    return leases


# ---- the same request again


async def test_the_same_request_at_the_same_moment_runs_once(cluster):
    await cluster.create_run("r", group_size=2)
    channels = [connect(cluster.address) for _ in range(4)]
    stubs = [wire.TrajectoryServiceStub(channel) for channel in channels]
    for count in range(1, 11):
        request = wire.SubmitGroupsRequest(request_id=rid(), run="runs/r", tasks=[wire.Task(json="{}")])
        answers = await asyncio.gather(*(stub.SubmitGroups(request, timeout=5) for stub in stubs))
        assert all(answer == answers[0] for answer in answers)
        assert len(cluster.state.groups) == count
    await asyncio.gather(*(channel.close() for channel in channels))


async def test_the_same_run_created_at_the_same_moment_is_one_run_and_one_answer(cluster):
    tasks = wire.TaskSource(file=cluster.blobs.put("tasks/r.jsonl", b'{"n": 1}'))
    run = wire.Run(policies=[wire.Policy(model="model")], tasks=tasks)
    request = wire.CreateRunRequest(request_id=rid(), run_id="r", run=run)
    answers = await asyncio.gather(*(cluster.trajectories.CreateRun(request, timeout=5) for _ in range(4)))
    assert all(answer == answers[0] for answer in answers)


async def test_the_request_of_an_earlier_life_is_fenced_and_the_newer_life_goes_on(cluster):
    first, second = (
        wire.BeginSessionRequest(request_id=rid(), worker="workers/w", kind=wire.WORKER_KIND_ROLLOUT) for _ in range(2)
    )
    await cluster.fleet.BeginSession(first, timeout=5)
    newer = await cluster.fleet.BeginSession(second, timeout=5)
    failure = await refused(cluster.fleet.BeginSession(first, timeout=5))
    assert failure.reason == "SESSION_FENCED"
    assert (await cluster.fleet.BeginSession(second, timeout=5)).session.name == newer.session.name
    caller = wire.Caller(session=newer.session.name, epoch=newer.session.epoch, seen_term=newer.stamp.term)
    answer = await cluster.fleet.Report(wire.ReportRequest(caller=caller, seq=1, delta=wire.Delta()), timeout=5)
    assert answer.acked_seq == 1


# ---- reports


@pytest.mark.parametrize("where", ["turn", "prompt", "segment", "trained segment"])
async def test_counts_beyond_all_reason_are_refused_part_by_part(cluster, where):
    async with one_engine(cluster) as (_, robot):
        one, other = await hold(cluster, robot)
        huge = {
            "turn": {"tokens": 1 << 62, "prompt": 0},
            "prompt": {"prompt": 1 << 62},
            "segment": {"prompt": 1 << 62},
            "trained segment": {"tokens": 1 << 62, "prompt": 0},
        }
        bad = robot.turn(one, **huge[where])
        if "segment" in where:
            del bad.turns[:]
        refusals = await robot.report(wire.Delta(progress=[bad, robot.turn(other)]))
        assert [(r.name, r.reason.code) for r in refusals] == [(one.trajectory, "INVALID_FIELD")]
        assert cluster.state.trajectories[one.trajectory].generated_tokens == 0
        assert cluster.state.trajectories[other.trajectory].generated_tokens == 4
        await lives(cluster)


async def test_the_good_part_of_a_report_is_kept_whatever_the_others_are(cluster):
    async with one_engine(cluster) as (_, robot):
        lease, _other = await hold(cluster, robot)
        good = robot.turn(lease)
        bad = wire.TrajectoryProgress(
            trajectory=lease.trajectory, attempt=lease.attempt, lease_epoch=lease.lease_epoch,
            turns=[wire.Turn(index=1, generated_tokens=1, finish=99)],
        )  # fmt: skip
        refusals = await robot.report(wire.Delta(progress=[good, bad]))
        assert [(r.name, r.reason.code) for r in refusals] == [(lease.trajectory, "INVALID_FIELD")]
        assert await robot.report(wire.Delta(progress=[good])) == []
        await cluster.restart()
        key = (lease.trajectory, lease.attempt)
        assert [s.tokens for s in cluster.state.segments[key]] == [7]
        assert [t.generated_tokens for t in cluster.state.turns[key]] == [4]
        assert cluster.state.trajectories[lease.trajectory].generated_tokens == 4


async def test_the_same_turn_twice_in_one_report_is_counted_once_at_most(cluster):
    async with one_engine(cluster) as (_, robot):
        lease, _other = await hold(cluster, robot)
        twice = robot.turn(lease)
        twice.turns.add().CopyFrom(twice.turns[0])
        twice.turns[1].generated_tokens = 1_000
        refusals = await robot.report(wire.Delta(progress=[twice]))
        assert [r.reason.code for r in refusals] == ["ALREADY_EXISTS"]
        assert cluster.state.trajectories[lease.trajectory].generated_tokens in (0, 4)
        assert len(cluster.state.turns.get((lease.trajectory, lease.attempt), [])) <= 1


@pytest.mark.parametrize(("lineage", "number"), [(7, 0), (1, 900)])
async def test_tokens_of_a_version_that_was_never_made_are_refused(cluster, lineage, number):
    async with one_engine(cluster) as (_, robot):
        lease, _other = await hold(cluster, robot)
        invented = robot.turn(lease, version=wire.VersionRef(lineage=lineage, number=number))
        refusals = await robot.report(wire.Delta(progress=[invented]))
        assert [r.reason.code for r in refusals] == ["INVALID_FIELD"]
        assert cluster.state.trajectories[lease.trajectory].generated_tokens == 0


async def test_a_numbered_report_without_content_is_a_mere_renewal(cluster):
    async with one_engine(cluster) as (_, robot):
        leases = await hold(cluster, robot, group_size=4)
        session = robot.session
        held = cluster.scheduler.cycle.holds.of(session.name)
        await cluster.until(lambda: held.digest == session._digest and set(held.items) >= set(robot.leases))
        robot._run.cancel()  # from here on the test speaks for it
        seq = cluster.state.sessions[session.name].acked_seq + 1
        request = wire.ReportRequest(caller=session.caller(), seq=seq, digest=session._digest)
        answer = await cluster.fleet.Report(request, timeout=5)
        assert (answer.acked_seq, answer.need_state) == (seq, False)
        assert set(held.items) >= {lease.trajectory for lease in leases}
        now = [cluster.state.trajectories[lease.trajectory] for lease in leases]
        assert {(t.state, t.attempt, t.lease_epoch) for t in now} == {("LEASED", 1, 1)}


async def test_a_load_that_is_not_a_number_is_dropped(cluster):
    async with NodeRobot(cluster.address, {0: wire.POOL_HYBRID}) as node:

        async def found(index: int, share: float) -> bool:
            load = wire.NodeLoad(node=wire.Node(name=NODE))
            load.accelerators.add(name=accelerator(index), type="cpu", pool=wire.POOL_HYBRID, cpu_share=share)
            request = wire.ReportRequest(caller=node.session.caller(), load=wire.Load(node=load))
            await cluster.fleet.Report(request, timeout=5)
            return accelerator(index) in cluster.state.accelerators

        assert not await found(7, float("nan"))
        assert not await found(7, float("inf"))
        assert await found(7, 0.5)
        await lives(cluster)


class SecondAgent(Robot):
    """A node agent on another machine that was given the same name."""

    kind = wire.WORKER_KIND_NODE


@pytest.mark.parametrize("impostor", [SecondAgent, Robot])
async def test_a_node_that_has_an_agent_gets_no_other(cluster, impostor):
    async with (
        NodeRobot(cluster.address, {2: wire.POOL_HYBRID}) as node,
        impostor(cluster.address, "other-machine") as other,
    ):
        await cluster.until(lambda: accelerator(2) in cluster.state.accelerators)
        load = wire.NodeLoad(node=wire.Node(name=NODE))
        for index in (2, 3):
            load.accelerators.add(name=accelerator(index), type="cpu", device_uuid="another", pool=wire.POOL_HYBRID)
        request = wire.ReportRequest(caller=other.session.caller(), load=wire.Load(node=load))
        await cluster.fleet.Report(request, timeout=5)
        assert cluster.state.nodes[NODE].agent_session == node.session.name
        assert cluster.state.accelerators[accelerator(2)].device_uuid == "cpu-2"
        assert accelerator(3) not in cluster.state.accelerators


async def test_a_rollout_worker_is_no_node_agent_even_where_there_is_none(cluster):
    async with Robot(cluster.address, "rollout-1") as robot:
        load = wire.NodeLoad(node=wire.Node(name="nodes/n9"))
        load.accelerators.add(name="nodes/n9/accelerators/0", type="cpu", pool=wire.POOL_HYBRID)
        request = wire.ReportRequest(caller=robot.session.caller(), load=wire.Load(node=load))
        await cluster.fleet.Report(request, timeout=5)
        assert not cluster.state.nodes
        assert not cluster.state.accelerators


# ---- what workers are told


@pytest.fixture
async def roomy(tmp_path: Path):
    """An engine takes hundreds of trajectories."""
    running = Cluster(tmp_path, planner={"enabled": False}, default_concurrency_cap=400)
    await running.start()
    yield running
    await running.stop()


@pytest.mark.parametrize("restarted", [False, True])
async def test_leases_with_large_tasks_come_in_several_answers(roomy, restarted):
    cluster = roomy
    async with one_engine(cluster) as (_, robot):
        large = json.dumps({"q": "x" * 16_370})
        await hold(cluster, robot, tasks=[large] * 36, group_size=8)
        if restarted:
            await cluster.restart()
        leases = await all_leases(cluster, robot)
        assert set(leases) == set(robot.leases)
        assert sum(lease.ByteSize() for lease in leases.values()) > MAX_MESSAGE_BYTES
        assert {lease.task.json for lease in leases.values()} == {large}


@pytest.mark.parametrize("restarted", [False, True])
async def test_leases_with_many_turns_come_in_several_answers(cluster, restarted):
    async with one_engine(cluster) as (_, robot):
        calls = [wire.ToolCallRecord(tool="t", arguments_sha256="a" * 64, output_sha256="b" * 64)] * 64
        for lease in await hold(cluster, robot, tasks=["{}"] * 4, group_size=8):
            played = wire.TrajectoryProgress()
            for index in range(16):
                turn = robot.turn(lease, first=4 * index, prompt=0, index=index, finish=wire.FINISH_REASON_TOOL_CALL)
                turn.turns[0].tool_calls.extend(calls)
                segments = turn.sequences[0].segments
                if index:
                    played.sequences[0].segments.extend(segments)
                    del turn.sequences[:]
                played.MergeFrom(turn)
            assert await robot.report(wire.Delta(progress=[played])) == []
        if restarted:
            await cluster.restart()
        leases = await all_leases(cluster, robot)
        assert set(leases) == set(robot.leases)
        assert sum(lease.ByteSize() for lease in leases.values()) > MAX_MESSAGE_BYTES
        assert {len(lease.turns) for lease in leases.values()} == {16}


# ---- batches and versions


async def test_a_batch_for_a_policy_that_is_not_trained_is_refused(cluster):
    async with small_fleet(cluster) as (_, trainer, *_rest):
        await cluster.create_run("r", group_size=2, batch=wire.BatchSize(groups=1))
        await cluster.submit("runs/r", 2)
        request = wire.TakeBatchRequest(
            request_id=rid(), caller=trainer.session.caller(), run="runs/r", policy="no-such", step=1,
            wait=wire.duration(5),
        )  # fmt: skip
        failure = await refused(cluster.trajectories.TakeBatch(request, timeout=10))
        assert failure.reason == "INVALID_FIELD"
        assert not cluster.state.manifests
        manifest = (await cluster.take(trainer, 1)).manifest
        assert list(cluster.state.manifests) == [manifest.name]


async def test_a_batch_returned_with_a_name_that_is_not_in_it_is_taken_again_whole(cluster):
    async with small_fleet(cluster) as (_, trainer, core, hybrid, _spare):

        async def play(robot, lease):
            if lease.sample == 2:
                await asyncio.Event().wait()
            await robot.one_turn(lease)

        core.play = lambda lease: play(core, lease)
        hybrid.play = lambda lease: play(hybrid, lease)
        await cluster.create_run(
            "r", group_size=2, batch=wire.BatchSize(groups=1), limits=wire.TrajectoryLimits(oversample=1)
        )
        await cluster.submit("runs/r", 1)
        first = (await cluster.take(trainer, 1)).manifest
        surplus = next(t for t in cluster.state.trajectories.values() if t.state == "CANCELLED")
        request = wire.ReturnBatchRequest(
            request_id=rid(), caller=trainer.session.caller(), manifest=first.name,
            broken=[surplus.name, "runs/r/trajectories/no-such", ""],
        )  # fmt: skip
        await cluster.trajectories.ReturnBatch(request, timeout=5)
        assert surplus.state == "CANCELLED"
        second = (await cluster.take(trainer, 1)).manifest
        assert second.name != first.name
        assert second.divisors == first.divisors
        await cluster.restart()
        assert (await cluster.take(trainer, 1)).manifest.name == second.name
        taken = [m.name for m in cluster.state.manifests.values() if m.state == "TAKEN"]
        assert taken == [second.name]
        await lives(cluster)


async def test_a_version_without_files_is_not_published(cluster):
    async with small_fleet(cluster) as (_, trainer, *_rest):
        await cluster.create_run("r", group_size=2, batch=wire.BatchSize(groups=1))
        await cluster.submit("runs/r", 1)
        version = await cluster.commit(trainer, (await cluster.take(trainer, 1)).manifest)
        source = wire.LiveSource(endpoint="127.0.0.1:1", replica=trainer.members()[0].replica, generation=1)
        for sources in ([], [source]):
            request = wire.PublishWeightsRequest(
                request_id=rid(), caller=trainer.session.caller(), run="runs/r", version=version, sources=sources
            )
            failure = await refused(cluster.trajectories.PublishWeights(request, timeout=5))
            assert failure.reason == "INVALID_FIELD"
            assert [v.state for v in cluster.state.versions.values() if v.number == 1] == ["COMMITTED"]
        await cluster.publish(trainer, version)
        assert [v.state for v in cluster.state.versions.values() if v.number == 1] == ["PUBLISHED"]


async def test_a_trainer_granted_after_a_batch_was_taken_joins_with_the_next_one(cluster):
    async with small_fleet(cluster) as (_, trainer, core, hybrid, spare):
        await cluster.create_run(
            "r", group_size=2, batch=wire.BatchSize(groups=1), staleness=wire.StalenessPolicy(max_versions=4)
        )
        await cluster.submit("runs/r", 2)
        taken = await cluster.take(trainer, 1)
        assert [m.worker for m in taken.roster.members] == ["workers/trainer-0"]
        moved = await cluster.reassign_to_trainer(2)
        await cluster.until(lambda: cluster.state.reassignments[moved.name].state == "SUCCEEDED")
        await cluster.until(lambda: len(trainer.roster.members) == 2)
        again = await cluster.take(trainer, 1)
        assert again.manifest.name == taken.manifest.name
        assert list(again.roster.members) == list(taken.roster.members)
        await cluster.publish(trainer, await cluster.commit(trainer, taken.manifest, members=again.roster.members))
        following = await cluster.take(trainer, 2)
        assert {m.worker for m in following.roster.members} == {"workers/trainer-0", "workers/trainer-2"}


# ---- settings


async def test_a_run_whose_task_file_is_gone_waits_and_the_others_go_on(cluster):
    for name in ("gone", "stays"):
        await cluster.create_run(name, tasks=['{"n": 1}'], group_size=2, batch=wire.BatchSize(groups=1))
    file = Path(cluster.config.blobs) / "tasks" / "gone.jsonl"
    content = file.read_bytes()
    file.unlink()
    await cluster.restart()
    gone = cluster.state.runs["runs/gone"]
    await cluster.until(lambda: gone.state == "PAUSED")
    assert gone.reason_code == "TASKS_UNREADABLE"
    failure = await refused(
        cluster.admin.ResumeRun(wire.ResumeRunRequest(request_id=rid(), name="runs/gone"), timeout=5)
    )
    assert failure.reason == "BLOB_MISMATCH"
    async with small_fleet(cluster) as (_, trainer, *_rest):
        assert (await cluster.take(trainer, 1, run="runs/stays")).manifest.groups == 1
        file.write_bytes(content)
        answer = await cluster.admin.ResumeRun(wire.ResumeRunRequest(request_id=rid(), name="runs/gone"), timeout=5)
        assert answer.run.state == wire.RUN_STATE_ACTIVE
        assert (await cluster.take(trainer, 1, run="runs/gone")).manifest.groups == 1


@pytest.mark.parametrize("large", [{"labels": {"note": "x" * 70_000}}, {"environment": "x" * 70_000}])
async def test_settings_too_large_to_be_told_to_every_worker_are_refused(cluster, large):
    assert (await refused(cluster.create_run("r", **large))).reason == "INVALID_FIELD"


async def test_a_model_name_too_large_to_be_told_to_every_worker_is_refused(cluster):
    run = wire.Run(policies=[wire.Policy(model="m" * 2_500_000)])
    request = wire.CreateRunRequest(request_id=rid(), run_id="r", run=run)
    assert (await refused(cluster.trajectories.CreateRun(request, timeout=5))).reason == "INVALID_FIELD"
    assert not cluster.state.runs


@pytest.mark.parametrize("oversample", [-8, -1, 1_025, 100_000, 2_000_000_000])
async def test_surplus_samples_out_of_bounds_are_refused(cluster, oversample):
    failure = await refused(cluster.create_run("r", limits=wire.TrajectoryLimits(oversample=oversample)))
    assert failure.reason == "INVALID_FIELD"


@pytest.mark.parametrize("seconds", [-1, 367 * 86_400, END_OF_INT64])
async def test_durations_below_zero_or_beyond_a_year_are_refused(cluster, seconds):
    time = wire.Duration(seconds=seconds)
    for fields in (
        {"limits": wire.TrajectoryLimits(max_run_time=time)},
        {"staleness": wire.StalenessPolicy(hold_timeout=time)},
        {"no_progress_timeout": time},
    ):
        assert (await refused(cluster.create_run("r", **fields))).reason == "INVALID_FIELD", fields
    begin = wire.BeginSessionRequest(request_id=rid(), worker="workers/w", kind=wire.WORKER_KIND_ROLLOUT, ttl=time)
    assert (await refused(cluster.fleet.BeginSession(begin, timeout=5))).reason == "INVALID_FIELD"


async def test_a_move_with_a_timeout_beyond_a_year_is_refused_and_changes_nothing(cluster):
    async with small_fleet(cluster) as (_, trainer, core, hybrid, spare):
        old = next(r for r in cluster.state.replicas.values() if r.worker == "workers/rollout-2")
        before = list(cluster.state.reassignments)
        request = wire.ReassignRequest(
            request_id=rid(),
            sources=[wire.ReassignmentSource(replica=old.name, generation=old.generation)],
            targets=[wire.ReassignmentTarget(spec=wire.ReplicaSpec(role=wire.ROLE_TRAINER))],
            timeout=wire.Duration(seconds=END_OF_INT64),
        )
        assert (await refused(cluster.admin.Reassign(request, timeout=5))).reason == "INVALID_FIELD"
        assert list(cluster.state.reassignments) == before
        assert old.state == "ACTIVE"


# ---- inputs that nobody expects


def checked(**fields) -> wire.CreateRunRequest:
    run = wire.Run(policies=[wire.Policy(model="m")], **fields)
    return wire.CreateRunRequest(request_id=rid(), run_id="x", run=run, validate_only=True)


def submitted(text: str) -> wire.SubmitGroupsRequest:
    return wire.SubmitGroupsRequest(request_id=rid(), run="runs/r", tasks=[wire.Task(json=text)])


def events(token: bytes) -> wire.ListEventsRequest:
    return wire.ListEventsRequest(page_token=base64.urlsafe_b64encode(token).decode())


LIMITS = wire.TrajectoryLimits
HOSTILE = {
    "run of kind 99": ("CreateRun", checked(kind=99), "INVALID_FIELD"),
    "on_exceed 99": ("CreateRun", checked(staleness=wire.StalenessPolicy(on_exceed=99)), "INVALID_FIELD"),
    "max_turns -1": ("CreateRun", checked(limits=LIMITS(max_turns=-1)), "INVALID_FIELD"),
    "max_generated_tokens -1": ("CreateRun", checked(limits=LIMITS(max_generated_tokens=-1)), "INVALID_FIELD"),
    "max_sequence_tokens -1": ("CreateRun", checked(limits=LIMITS(max_sequence_tokens=-1)), "INVALID_FIELD"),
    "multiple_of -3": ("CreateRun", checked(batch=wire.BatchSize(groups=4, multiple_of=-3)), "INVALID_FIELD"),
    "min_groups -2": ("CreateRun", checked(batch=wire.BatchSize(groups=4, min_groups=-2)), "INVALID_FIELD"),
    "temperature NaN": ("CreateRun", checked(sampling=wire.SamplingParams(temperature=float("nan"))), "INVALID_FIELD"),
    "epochs -1": (
        "CreateRun",
        checked(tasks=wire.TaskSource(file=wire.BlobRef(uri="file:///x", sha256="0" * 64, size_bytes=1), epochs=-1)),
        "INVALID_FIELD",
    ),
    "NUL in a label": ("CreateRun", checked(labels={"a": "\0"}), "INVALID_FIELD"),
    "task nested deeply": ("SubmitGroups", submitted('{"a":' + "[" * 8_000 + "]" * 8_000 + "}"), "INVALID_FIELD"),
    "task of NUL": ("SubmitGroups", submitted("\0"), "INVALID_FIELD"),
    "list of states 99": (
        "ListTrajectories", wire.ListTrajectoriesRequest(parent="runs/r", states=[99]), "INVALID_FIELD",
    ),
    "long trajectory name": (
        "GetTrajectory", wire.GetTrajectoryRequest(name="runs/r/trajectories/" + "x" * 30_000), "NOT_FOUND",
    ),
    "session of kind 99": (
        "BeginSession", wire.BeginSessionRequest(request_id=rid(), worker="workers/z", kind=99), "INVALID_FIELD",
    ),
    "list of kind 99": (
        "ListResources", wire.ListResourcesRequest(selector=wire.Selector(kinds=[99])), "INVALID_FIELD",
    ),
    "token that is a number": ("ListEvents", events(b"5"), "BAD_PAGE_TOKEN"),
    "token that is null": ("ListEvents", events(b"null"), "BAD_PAGE_TOKEN"),
    "token of other parts": ("ListEvents", events(b'[null, {}, ""]'), "BAD_PAGE_TOKEN"),
    "token nested deeply": ("ListEvents", events(b"[" * 200_000), "BAD_PAGE_TOKEN"),
    "token of no base64": ("ListEvents", wire.ListEventsRequest(page_token="%%%é"), "BAD_PAGE_TOKEN"),
    "no name": ("GetResource", wire.GetResourceRequest(), "INVALID_FIELD"),
    "name of a slash": ("GetResource", wire.GetResourceRequest(name="/"), "INVALID_FIELD"),
    "name without an end": ("GetResource", wire.GetResourceRequest(name="runs/"), "NOT_FOUND"),
    "name with a gap": ("GetResource", wire.GetResourceRequest(name="runs//trajectories/"), "NOT_FOUND"),
    "accelerator zzz": ("GetResource", wire.GetResourceRequest(name="nodes/n0/accelerators/zzz"), "NOT_FOUND"),
    "session x": ("GetResource", wire.GetResourceRequest(name="workers/a/sessions/x"), "NOT_FOUND"),
    "name with NUL": ("GetResource", wire.GetResourceRequest(name="runs/r/trajectories/\0"), "INVALID_FIELD"),
    "no name to explain": ("Explain", wire.ExplainRequest(), "INVALID_FIELD"),
    "half a name to explain": ("Explain", wire.ExplainRequest(name="runs/"), "NOT_FOUND"),
    "session to explain": ("Explain", wire.ExplainRequest(name="workers/a/sessions/x"), "NOT_FOUND"),
    "NUL to explain": ("Explain", wire.ExplainRequest(name="runs/\0"), "INVALID_FIELD"),
}  # fmt: skip


@pytest.mark.parametrize(("method", "message", "reason"), HOSTILE.values(), ids=HOSTILE)
async def test_a_bad_input_gives_a_named_error(cluster, method, message, reason):
    await cluster.create_run("r", group_size=2)
    stub = next(s for s in (cluster.trajectories, cluster.admin, cluster.fleet) if hasattr(s, method))
    failure = await refused(getattr(stub, method)(message, timeout=5))
    assert failure.status is not grpc.StatusCode.INTERNAL
    assert failure.reason == reason
    await lives(cluster)


async def test_a_task_file_that_is_no_text_gives_a_named_error(cluster):
    blob = cluster.blobs.put("tasks/bad.jsonl", b'{"a": "\xff\xfe"}\n')
    request = checked(tasks=wire.TaskSource(file=blob))
    failure = await refused(cluster.trajectories.CreateRun(request, timeout=5))
    assert failure.reason == "INVALID_FIELD"
    assert "UTF-8" in failure.message


async def test_a_batch_of_a_negative_size_gives_a_named_error(cluster):
    async with small_fleet(cluster) as (_, trainer, *_rest):
        await cluster.create_run("r", group_size=2)
        for field in ("groups", "min_groups", "multiple_of"):
            failure = await refused(cluster.take(trainer, 1, wait=0.5, **{field: -5}))
            assert failure.reason == "INVALID_FIELD", field


@pytest.mark.parametrize("revision", [-5, END_OF_INT64])
async def test_events_of_revisions_that_there_are_not_are_listed_without_an_error_of_ours(cluster, revision):
    await cluster.create_run("r", group_size=2)
    answer = await cluster.admin.ListEvents(wire.ListEventsRequest(start_revision=revision), timeout=5)
    assert bool(answer.events) == (revision < 0)
