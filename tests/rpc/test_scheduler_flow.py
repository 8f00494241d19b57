"""One trajectory, one step, one hand-over, over the real wire with fake workers."""

import asyncio

import grpc
import pytest

from services.common import wire
from services.common.errors import LibraError
from tests.support.robots import SHA, accelerator, refused, rid, small_fleet


async def test_a_group_is_generated_taken_committed_and_published(cluster):
    async with small_fleet(cluster) as (_, trainer, core, hybrid, _spare):
        await cluster.create_run("r", tasks=['{"n": 1}', '{"n": 2}'], group_size=2, batch=wire.BatchSize(groups=2))
        taken = await cluster.take(trainer, 1)
        assert taken.manifest.divisors.trajectories == 4
        assert taken.manifest.divisors.trainable_tokens == 4 * 4
        again = await cluster.take(trainer, 1)
        assert again.manifest.name == taken.manifest.name
        members = await cluster.trajectories.ListManifestMembers(
            wire.ListManifestMembersRequest(manifest=taken.manifest.name), timeout=5
        )
        assert len(members.members) == 4
        assert {m.reward.value for m in members.members} == {1.0}
        version = await cluster.commit(trainer, taken.manifest)
        assert (version.lineage, version.number) == (1, 1)
        assert await cluster.commit(trainer, taken.manifest) == version
        await cluster.publish(trainer, version)
        await cluster.until(lambda: cluster.state.runs["runs/r"].state == "FINISHED")
        run = (await cluster.trajectories.GetRun(wire.GetRunRequest(name="runs/r"), timeout=5)).run
        assert {t.state: t.count for t in run.counts.terminal} == {"TRAINED": 4}
        failure = await refused(cluster.take(trainer, 2))
        assert failure.reason == "RUN_NOT_ACTIVE"


async def test_a_step_that_all_its_replicas_commit_at_once_is_seen_once(cluster):
    async with small_fleet(cluster) as (_, trainer, core, hybrid, _spare):
        await cluster.create_run("r", group_size=2, batch=wire.BatchSize(groups=1))
        names = []
        for step in range(1, 9):
            await cluster.submit("runs/r", 1)
            manifest = (await cluster.take(trainer, step)).manifest
            names.append(manifest.name)
            versions = await asyncio.gather(*(cluster.commit(trainer, manifest) for _ in range(8)))
            assert {(v.lineage, v.number) for v in versions} == {(1, step)}
            await cluster.publish(trainer, versions[0])
        assert [s.manifest for s in cluster.scheduler.cycle.observe.steps] == names


async def test_a_caller_is_told_to_ask_again_when_the_store_fails(cluster):
    ledger = cluster.scheduler.cycle.ledger
    lost = asyncio.get_running_loop().create_future()
    lost.set_exception(OSError("server closed the connection unexpectedly"))
    ledger._last = lost
    with pytest.raises(LibraError, match="ask again") as caught:
        await ledger.barrier()
    assert caught.value.reason == "NOT_LEADER"
    assert caught.value.status is grpc.StatusCode.UNAVAILABLE


async def test_weights_are_prepared_then_switched_on_every_engine(cluster):
    async with small_fleet(cluster) as (_, trainer, core, hybrid, _spare):
        await cluster.create_run("r", group_size=2, batch=wire.BatchSize(groups=2))
        await cluster.submit("runs/r", 2)
        taken = await cluster.take(trainer, 1)
        await cluster.publish(trainer, await cluster.commit(trainer, taken.manifest))
        await cluster.until(
            lambda: {r.serving_number for r in cluster.state.replicas.values() if r.role == "ROLLOUT"} == {1}
        )
        for robot in (core, hybrid):
            phases = [c.load_weights.phase for c in robot.commands if c.WhichOneof("action") == "load_weights"]
            # two control calls for each version, whatever the number of tensors (case 20)
            assert phases == [wire.LOAD_PHASE_PREPARE, wire.LOAD_PHASE_SWITCH] * (len(phases) // 2)


async def test_a_commit_that_differs_from_the_manifest_is_refused(cluster):
    async with small_fleet(cluster) as (_, trainer, *_rest):
        await cluster.create_run("r", tasks=['{"n": 1}'], group_size=2, batch=wire.BatchSize(groups=1))
        manifest = (await cluster.take(trainer, 1)).manifest
        for change in (
            {"trainable_tokens": 1},
            {"base_version": wire.VersionRef(lineage=1, number=5)},
            {"members": []},
            {"members": [wire.RosterMember(worker="workers/x", replica="replicas/none", generation=1)]},
        ):
            failure = await refused(cluster.commit(trainer, manifest, **change))
            assert failure.reason == "COMMIT_REFUSED", change
        assert (await cluster.commit(trainer, manifest)).number == 1


async def test_a_hybrid_accelerator_changes_sides_only_after_a_confirmed_release(cluster):
    async with small_fleet(cluster) as (node, trainer, core, hybrid, spare):
        await cluster.create_run("r", group_size=2)
        node.confirms = False
        old = cluster.state.replica_on(accelerator(2))
        moved = await cluster.reassign_to_trainer(2)
        await cluster.until(lambda: sum(c.handover.step.kind == wire.HANDOVER_KIND_CONFIRM for c in node.commands) >= 2)
        assert not [r for r in cluster.state.replicas.values() if r.worker == "workers/trainer-2"]
        assert old.state == "RELEASING"
        node.confirms = True
        await cluster.until(lambda: cluster.state.reassignments[moved.name].state == "SUCCEEDED")
        new = next(r for r in cluster.state.replicas.values() if r.worker == "workers/trainer-2")
        assert new.generation > old.generation
        assert old.state == "RELEASED"
        await cluster.until(lambda: len(trainer.roster.members) == 2)
        explained = await cluster.admin.Explain(wire.ExplainRequest(name=accelerator(2)), timeout=5)
        assert "workers/trainer-2" in explained.summary


async def test_a_grant_that_fails_is_rolled_back_and_the_source_serves_again(impatient):
    cluster = impatient
    async with small_fleet(cluster) as (node, trainer, core, hybrid, spare):

        async def refuse(command: wire.Command) -> wire.CommandResult:
            return wire.CommandResult(
                state=wire.COMMAND_STATE_FAILED, reason=wire.Reason(code="OUT_OF_MEMORY", text="no memory")
            )

        spare.on_command = refuse  # type: ignore[method-assign]
        spare.session._handler = spare
        old = cluster.state.replica_on(accelerator(2))
        moved = await cluster.reassign_to_trainer(2)
        await cluster.until(lambda: cluster.state.reassignments[moved.name].state == "ROLLED_BACK", timeout=15)
        back = cluster.state.replica_on(accelerator(2))
        assert back is not None
        assert (back.role, back.state) == ("ROLLOUT", "ACTIVE")
        assert back.generation > old.generation


async def test_a_crashed_worker_is_replaced_only_after_the_node_confirms(impatient):
    cluster = impatient
    async with small_fleet(cluster) as (node, trainer, core, hybrid, spare):
        node.confirms = False
        old = next(r for r in cluster.state.replicas.values() if r.worker == "workers/rollout-2")
        await hybrid.kill()
        await cluster.until(lambda: old.state in ("UNCONFIRMED", "QUARANTINED"))
        assert cluster.state.accelerators[accelerator(2)].replicas == (old.name,)
        node.confirms = True
        await cluster.until(lambda: old.state == "RELEASED")


async def test_preempted_by_an_operator_resumes_with_its_tokens(cluster):
    async with small_fleet(cluster) as (_, trainer, core, hybrid, _spare):
        seen: list[wire.TrajectoryLease] = []

        async def play(robot, lease):
            seen.append(lease)
            if not lease.turns:
                part = robot.turn(lease, finish=0, interruption=wire.INTERRUPTION_PREEMPTED)
                await robot.report(wire.Delta(progress=[part]))
                await asyncio.Event().wait()
            rest = robot.turn(lease, first=7, prompt=0, index=0, part=1)
            await robot.report(wire.Delta(progress=[rest]))
            await robot.end(lease, reward=1.0)

        core.play = lambda lease: play(core, lease)
        hybrid.play = lambda lease: play(hybrid, lease)
        await cluster.create_run("r", group_size=2)
        await cluster.submit("runs/r", 1)
        await cluster.until(lambda: sum(t.generated_tokens == 4 for t in cluster.state.trajectories.values()) == 2)
        name = next(iter(cluster.state.trajectories))
        answer = await cluster.admin.Preempt(wire.PreemptRequest(request_id=rid(), trajectories=[name]), timeout=5)
        assert answer.commands[0]
        await cluster.until(lambda: cluster.state.trajectories[name].state == "SCORED")
        resumed = next(lease for lease in seen if lease.trajectory == name and lease.turns)
        assert resumed.lease_epoch == 2
        assert resumed.sequences[0].segments[0].tokens == 7
        assert cluster.state.trajectories[name].generated_tokens == 8


async def test_case_01_completions_that_vanish_are_queued_again_and_named(impatient):
    cluster = impatient
    async with small_fleet(cluster) as (_, trainer, core, hybrid, _spare):
        dropped: set[str] = set()

        async def play(robot, lease):
            if len(dropped) < 3 and lease.lease_epoch == 1:
                dropped.add(lease.trajectory)
                robot.forget(lease.trajectory)
                return
            await robot.one_turn(lease)

        core.play = lambda lease: play(core, lease)
        hybrid.play = lambda lease: play(hybrid, lease)
        await cluster.create_run(
            "r", tasks=[f'{{"n": {n}}}' for n in range(16)], group_size=8, batch=wire.BatchSize(groups=16)
        )
        taken = await cluster.take(trainer, 1, wait=20)
        assert taken.manifest.divisors.trajectories == 128
        events = await cluster.admin.ListEvents(
            wire.ListEventsRequest(
                selector=wire.Selector(kinds=[wire.RESOURCE_KIND_TRAJECTORY], states=["QUEUED"]), page_size=1000
            ),
            timeout=5,
        )
        named = {e.name for e in events.events if e.reason.code in ("NOT_HELD", "STALLED")}
        assert named == dropped


async def test_case_02_take_batch_says_why_when_all_rollout_workers_are_dead(impatient):
    cluster = impatient
    async with small_fleet(cluster) as (_, trainer, core, hybrid, _spare):
        core.play = hybrid.play = lambda lease: asyncio.Event().wait()
        await cluster.create_run("r", tasks=['{"n": 1}'], group_size=2, batch=wire.BatchSize(groups=1))
        await core.kill()
        await hybrid.kill()
        failure = await refused(cluster.take(trainer, 1, wait=2.5))
        assert failure.reason == "NO_PROGRESS"
        assert failure.status is grpc.StatusCode.FAILED_PRECONDITION
        assert "no rollout engine serves" in failure.message


async def test_case_04_a_failed_attempt_ends_in_exactly_one_terminal_record(cluster):
    async with small_fleet(cluster) as (_, trainer, core, hybrid, _spare):
        for robot in (core, hybrid):
            robot.play = lambda lease, robot=robot: robot.end(lease, failure=wire.FAILURE_CLASS_EPISODE)
        await cluster.create_run(
            "r", group_size=2, void_policy=wire.VoidPolicy(action=wire.ON_VOID_DROP_GROUP),
            failure_rules=[wire.FailureRule(failure=wire.FAILURE_CLASS_EPISODE, action=wire.FAILURE_ACTION_VOID)],
        )  # fmt: skip
        await cluster.submit("runs/r", 1)
        await cluster.until(lambda: not cluster.state.trajectories)
        listed = await cluster.trajectories.ListTrajectories(wire.ListTrajectoriesRequest(parent="runs/r"), timeout=5)
        states = sorted(wire.TrajectoryState.Name(t.state) for t in listed.trajectories)
        assert len(states) == 2
        assert "TRAJECTORY_STATE_VOID" in states
        assert set(states) <= {"TRAJECTORY_STATE_VOID", "TRAJECTORY_STATE_CANCELLED"}


async def test_case_05_a_bad_example_is_dropped_after_max_attempts(cluster):
    async with small_fleet(cluster) as (_, trainer, core, hybrid, _spare):
        tries: list[int] = []

        async def play(robot, lease):
            if '"n": 0' in lease.task.json:
                tries.append(lease.attempt)
                await robot.end(lease, failure=wire.FAILURE_CLASS_EPISODE)
            else:
                await robot.one_turn(lease)

        core.play = lambda lease: play(core, lease)
        hybrid.play = lambda lease: play(hybrid, lease)
        await cluster.create_run(
            "r", tasks=['{"n": 0}', '{"n": 1}'], group_size=2, batch=wire.BatchSize(groups=1),
            void_policy=wire.VoidPolicy(action=wire.ON_VOID_REPLACE, max_replacements=1),
        )  # fmt: skip
        taken = await cluster.take(trainer, 1)
        assert taken.manifest.groups == 1
        await cluster.until(lambda: "runs/r/groups/0" not in cluster.state.groups)
        assert max(tries) == 3
        run = (await cluster.trajectories.GetRun(wire.GetRunRequest(name="runs/r"), timeout=5)).run
        counts = {t.state: t.count for t in run.counts.terminal}
        assert counts["VOID"] >= 1
        assert sum(counts.values()) + run.counts.in_flight == 5


async def test_case_25_a_trajectory_preempted_in_the_queue_keeps_what_was_acknowledged(cluster):
    async with small_fleet(cluster) as (_, trainer, core, hybrid, _spare):

        async def play(robot, lease):
            if lease.turns:
                await asyncio.Event().wait()
            await robot.report(
                wire.Delta(progress=[robot.turn(lease, finish=0, interruption=wire.INTERRUPTION_PREEMPTED)])
            )
            await robot.end(lease, interrupted=wire.INTERRUPTION_PREEMPTED)

        core.play = lambda lease: play(core, lease)
        hybrid.play = lambda lease: play(hybrid, lease)
        await cluster.create_run("r", group_size=2)
        await cluster.submit("runs/r", 1)
        await cluster.until(lambda: all(t.lease_epoch == 2 for t in cluster.state.trajectories.values()))
        for name in list(cluster.state.trajectories):
            answer = await cluster.trajectories.GetTrajectory(
                wire.GetTrajectoryRequest(name=name, view=wire.TRAJECTORY_VIEW_FULL), timeout=5
            )
            segment = answer.trajectory.sequences[0].segments[0]
            assert (segment.tokens, segment.trainable_tokens, segment.blob.sha256) == (7, 4, SHA)
            assert segment.versions[0].version.lineage == 1


async def test_case_31_a_finished_group_that_sat_too_long_never_reaches_the_trainer(cluster):
    async with small_fleet(cluster) as (_, trainer, core, hybrid, _spare):
        # the first group finishes at once, with tokens of version 0; later ones are of the version then served
        await cluster.create_run(
            "r", group_size=2, batch=wire.BatchSize(groups=1),
            staleness=wire.StalenessPolicy(max_versions=1, on_exceed=wire.ON_EXCEED_DROP_GROUP),
        )  # fmt: skip
        await cluster.submit("runs/r", 4)
        await cluster.until(lambda: sum(g.state == "CLOSED" for g in cluster.state.groups.values()) == 4)
        for step in (1, 2):
            manifest = (await cluster.take(trainer, step)).manifest
            await cluster.publish(trainer, await cluster.commit(trainer, manifest))
        # base version 2, tokens of version 0: older than K = 1
        failure = await refused(cluster.take(trainer, 3, wait=0.5))
        assert failure.reason == "NO_PROGRESS"
        listed = await cluster.trajectories.ListTrajectories(
            wire.ListTrajectoriesRequest(parent="runs/r", states=[wire.TRAJECTORY_STATE_STALE]), timeout=5
        )
        assert len(listed.trajectories) == 4


async def test_case_54_a_batch_that_could_never_be_taken_is_refused_with_both_numbers(cluster):
    failure = await refused(cluster.create_run("r", batch=wire.BatchSize(groups=4, multiple_of=8)))
    assert failure.reason == "INCONSISTENT_SETTINGS"
    assert "8" in failure.message
    assert "4" in failure.message


async def test_case_56_a_late_result_with_an_old_attempt_is_refused_and_counted(impatient):
    cluster = impatient
    async with small_fleet(cluster) as (_, trainer, core, hybrid, _spare):
        held: list[wire.TrajectoryLease] = []

        async def hold(lease):
            held.append(lease)
            await asyncio.Event().wait()

        core.play = hybrid.play = hold
        await cluster.create_run("r", group_size=2)
        await cluster.submit("runs/r", 1)
        await cluster.until(lambda: len(held) >= 2)
        lease = held[0]
        robot = core if lease.trajectory in core.leases else hybrid
        old = wire.TrajectoryLease(
            trajectory=lease.trajectory, attempt=lease.attempt, lease_epoch=lease.lease_epoch - 1
        )
        refusals = await robot.end(old, reward=1.0)
        assert [r.reason.code for r in refusals] == ["STALE_ATTEMPT"]
        assert cluster.state.runs["runs/r"].stale_attempts == 1


async def test_case_59_a_trajectory_without_a_trainable_token_never_reaches_a_batch(cluster):
    async with small_fleet(cluster) as (_, trainer, core, hybrid, _spare):

        async def play(robot, lease):
            if lease.sample == 0 and lease.attempt == 1:
                await robot.end(lease, reward=0.0)
            else:
                await robot.one_turn(lease)

        core.play = lambda lease: play(core, lease)
        hybrid.play = lambda lease: play(hybrid, lease)
        await cluster.create_run("r", tasks=['{"n": 1}'], group_size=2, batch=wire.BatchSize(groups=1))
        taken = await cluster.take(trainer, 1)
        members = await cluster.trajectories.ListManifestMembers(
            wire.ListManifestMembersRequest(manifest=taken.manifest.name), timeout=5
        )
        assert all(m.tokens.trainable > 0 for m in members.members)


async def test_case_59_a_finish_without_tokens_is_refused(cluster):
    async with small_fleet(cluster) as (_, trainer, core, hybrid, _spare):
        held: list[tuple[object, wire.TrajectoryLease]] = []

        async def hold(robot, lease):
            held.append((robot, lease))
            await asyncio.Event().wait()

        core.play = lambda lease: hold(core, lease)
        hybrid.play = lambda lease: hold(hybrid, lease)
        await cluster.create_run("r", group_size=2)
        await cluster.submit("runs/r", 1)
        await cluster.until(lambda: held)
        robot, lease = held[0]
        refusals = await robot.report(wire.Delta(progress=[robot.turn(lease, tokens=0, trainable=0)]))
        assert refusals[0].reason.code == "INVALID_FIELD"


async def test_case_61_finish_reason_and_truncation_survive_to_the_batch_record(cluster):
    async with small_fleet(cluster) as (_, trainer, core, hybrid, _spare):

        async def play(robot, lease):
            cut = robot.turn(lease, finish=wire.FINISH_REASON_LENGTH, truncated=True)
            await robot.report(wire.Delta(progress=[cut]))
            await robot.end(lease, reward=0.0)

        core.play = lambda lease: play(core, lease)
        hybrid.play = lambda lease: play(hybrid, lease)
        await cluster.create_run("r", tasks=['{"n": 1}'], group_size=2, batch=wire.BatchSize(groups=1))
        taken = await cluster.take(trainer, 1)
        members = await cluster.trajectories.ListManifestMembers(
            wire.ListManifestMembersRequest(manifest=taken.manifest.name), timeout=5
        )
        assert {(m.finish, m.truncated) for m in members.members} == {(wire.FINISH_REASON_LENGTH, True)}


async def test_case_62_one_failed_rollout_of_many_does_not_stop_the_step(cluster):
    async with small_fleet(cluster) as (_, trainer, core, hybrid, _spare):

        async def play(robot, lease):
            if lease.trajectory.endswith("/5-3") and lease.attempt == 1:
                await robot.end(lease, failure=wire.FAILURE_CLASS_EPISODE)
            else:
                await robot.one_turn(lease)

        core.play = lambda lease: play(core, lease)
        hybrid.play = lambda lease: play(hybrid, lease)
        tasks = [f'{{"n": {n}}}' for n in range(32)]
        await cluster.create_run("r", tasks=tasks, group_size=8, batch=wire.BatchSize(groups=32))
        taken = await cluster.take(trainer, 1, wait=20)
        assert taken.manifest.divisors.trajectories == 256


async def test_group_size_one_is_refused_for_training_and_fine_for_evaluation(cluster):
    failure = await refused(cluster.create_run("r", group_size=1))
    assert failure.reason == "INCONSISTENT_SETTINGS"
    run = await cluster.create_run("e", group_size=1, kind=wire.RUN_KIND_EVAL)
    assert run.state == wire.RUN_STATE_ACTIVE


async def test_an_unreachable_environment_is_refused_when_the_run_is_created(cluster):
    routes = [wire.ToolEnvRoute(environment="calculator", endpoint="127.0.0.1:1")]
    failure = await refused(cluster.create_run("r", environment="calculator", tool_envs=routes))
    assert "cannot be reached" in failure.message
    failure = await refused(cluster.create_run("r", environment="nowhere"))
    assert "nowhere" in failure.message


async def test_the_same_request_id_gives_the_same_answer_and_other_content_is_refused(cluster):
    await cluster.create_run("r", group_size=2)
    request = wire.SubmitGroupsRequest(request_id=rid(), run="runs/r", tasks=[wire.Task(json="{}")])
    first = await cluster.trajectories.SubmitGroups(request, timeout=5)
    assert await cluster.trajectories.SubmitGroups(request, timeout=5) == first
    request.tasks.add(json="{}")
    assert (await refused(cluster.trajectories.SubmitGroups(request, timeout=5))).reason == "REQUEST_ID_REUSED"


async def test_a_call_without_a_deadline_is_refused(cluster):
    failure = await refused(cluster.trajectories.GetRun(wire.GetRunRequest(name="runs/r")))
    assert failure.reason == "DEADLINE_REQUIRED"


async def test_work_goes_on_over_a_restart_of_the_scheduler(cluster):
    async with small_fleet(cluster) as (_, trainer, core, hybrid, _spare):
        started = asyncio.Event()
        release = asyncio.Event()

        async def play(robot, lease):
            await robot.report(wire.Delta(progress=[robot.turn(lease)]))
            started.set()
            await release.wait()
            await robot.end(lease, reward=1.0)

        core.play = lambda lease: play(core, lease)
        hybrid.play = lambda lease: play(hybrid, lease)
        await cluster.create_run("r", tasks=['{"n": 1}', '{"n": 2}'], group_size=2, batch=wire.BatchSize(groups=2))
        await started.wait()
        await cluster.until(lambda: sum(t.generated_tokens == 4 for t in cluster.state.trajectories.values()) == 4)
        term = cluster.state.term
        await cluster.restart()
        assert cluster.state.term == term + 1
        release.set()
        taken = await cluster.take(trainer, 1, wait=15)
        assert taken.manifest.divisors.trajectories == 4
        assert not core.lost
        assert not hybrid.lost


async def test_a_watch_resumes_where_it_was_broken_off(cluster):
    await cluster.create_run("r", group_size=2)

    async def read(start: int, wanted: int) -> tuple[list[str], int]:
        names: list[str] = []
        bookmark = 0
        call = cluster.trajectories.WatchRun(
            wire.WatchRunRequest(run="runs/r", options=wire.WatchOptions(start_revision=start)), timeout=10
        )
        async for message in call:
            names += [e.name for e in message.batch.events]
            bookmark = message.batch.bookmark
            if len(names) >= wanted:
                break
        call.cancel()
        return names, bookmark

    watching = asyncio.create_task(read(1, 2))
    await cluster.submit("runs/r", 2)
    first, bookmark = await watching
    await cluster.submit("runs/r", 1)
    second, _ = await read(bookmark + 1, 1)
    assert first == ["runs/r/groups/0", "runs/r/groups/1"]
    assert second == ["runs/r/groups/2"]
