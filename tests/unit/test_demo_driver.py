"""The demonstration's driver and live view, without processes: what ends a job, what is killed when, what is shown."""

import asyncio
import io
import json
import os
import signal
from types import SimpleNamespace

import pytest
from rich.console import Console

from services.common import wire
from services.common.errors import ConfigError, LibraError
from services.ops import chaos, demo, jobs, live
from services.ops.chaos import Chaos
from services.ops.cluster import claim
from services.ops.demo import Options


class FakeClient:
    """Answers like LibraClient from plain fields."""

    def __init__(self):
        self.run = wire.Run(name="runs/train", state=wire.RUN_STATE_ACTIVE, policies=[wire.Policy()])
        self.listed = {}
        self.events = []
        self.trajectories = []
        self.members = []
        self.down = False
        self.created = []

    async def create_run(self, run_id, run):
        self.created.append(run_id)
        return run

    async def get_run(self, name):
        if self.down:
            raise LibraError("UNAVAILABLE", "no scheduler")
        return self.run

    async def list_resources(self, kind, *, prefix="", states=(), limit=None):
        if self.down:
            raise LibraError("UNAVAILABLE", "no scheduler")
        return SimpleNamespace(resources=self.listed.get(kind, ()))

    async def list_trajectories(self, parent, *, states=(), full=False, limit=None):
        return [t for t in self.trajectories if t.state in states]

    async def list_manifest_members(self, manifest):
        return self.members

    async def list_events(self, *, selector=None, start_revision=0, limit=None):
        return [e for e in self.events if e.revision >= start_revision]

    async def explain(self, name):
        return wire.ExplainResponse(
            summary=f"{name} waits: no rollout engine serves since 4 s",
            decisions=[wire.Decision(reason=wire.Reason(code="HOLD", text="16 groups are wanted, 3 are ready"))],
        )


@pytest.fixture
def view(tmp_path):
    client = FakeClient()
    shown = live.View(client, tmp_path, Console(file=io.StringIO(), width=140))
    shown.client = client
    return shown


def accelerator(index, *replicas):
    return wire.Resource(accelerator=wire.Accelerator(name=f"nodes/n0/accelerators/{index}", replicas=replicas))


def rollout(worker, generated, running=2):
    engine = wire.EngineLoad(activity=wire.ENGINE_ACTIVITY_SERVING, running=running, generated_tokens=generated)
    load = wire.Load(rollout=wire.RolloutLoad(engines=[engine]))
    return wire.Resource(worker=wire.Worker(name=f"workers/{worker}", load=load))


# ---- live view


async def test_reading_says_who_holds_what_and_how_fast_it_goes(view, tmp_path):
    client = view.client
    replica = wire.Replica(
        name="replicas/rollout-2", owner_session="workers/rollout-2/sessions/1", state=wire.REPLICA_STATE_ACTIVE,
        desired=wire.ReplicaSpec(role=wire.ROLE_ROLLOUT), create_time=wire.timestamp(1_800_000_000),
    )  # fmt: skip
    client.listed = {
        wire.RESOURCE_KIND_REPLICA: [wire.Resource(replica=replica)],
        wire.RESOURCE_KIND_ACCELERATOR: [accelerator(2, replica.name), accelerator(3)],
        wire.RESOURCE_KIND_WORKER: [rollout("rollout-2", 100)],
    }
    client.trajectories = [
        wire.Trajectory(state=wire.TRAJECTORY_STATE_QUEUED, level=1),
        wire.Trajectory(state=wire.TRAJECTORY_STATE_LEASED, level=0),
    ]
    view.run, view.phase = "runs/train", "train"
    await view._read()
    client.listed[wire.RESOURCE_KIND_WORKER] = [rollout("rollout-2", 400)]
    await view._read()
    held = view.last.holders
    assert (held["nodes/n0/accelerators/2"].role, held["nodes/n0/accelerators/2"].worker) == ("ROLLOUT", "rollout-2")
    assert held["nodes/n0/accelerators/2"].since == 1_800_000_000
    assert held["nodes/n0/accelerators/3"].role == ""
    assert (view.last.queue, view.last.running) == ({"1": 1}, {"0": 1})
    assert view.last.tokens_per_s > 0
    assert "n0:2=rollout n0:3=free" in live.line(view.last)
    samples = [json.loads(row) for row in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert samples[1]["engines"]["rollout-2"]["generated"] == 400


async def test_a_restarted_engine_does_not_show_a_negative_speed(view):
    for generated in (500, 20):
        view.client.listed[wire.RESOURCE_KIND_WORKER] = [rollout("rollout-2", generated)]
        await view._read()
    assert view.last.tokens_per_s == 0.0


async def test_reward_is_that_of_the_newest_committed_step(view):
    client = view.client
    client.run.policies[0].head.number = 3
    manifests = [
        wire.Manifest(name="m3", step=3, state=wire.MANIFEST_STATE_COMMITTED),
        wire.Manifest(name="m4", step=4, state=wire.MANIFEST_STATE_TAKEN),
    ]
    client.listed[wire.RESOURCE_KIND_MANIFEST] = [wire.Resource(manifest=m) for m in manifests]
    client.members = [wire.ManifestMember(reward=wire.Reward(value=v)) for v in (1.0, 0.0, 1.0, 1.0)]
    view.run = "runs/train"
    await view._read()
    assert (view.last.step, view.last.reward) == (3, 0.75)


async def test_decisions_are_shown_once_with_their_reason_and_their_steps_are_not(view):
    def event(revision, code, text, before="", related=()):
        return wire.Event(
            revision=revision, from_state=before, reason=wire.Reason(code=code, text=text), related=related,
            name="reassignments/a",
        )  # fmt: skip

    view.client.events = [
        event(5, "TRAINING_BOUND", "rollout waits for training", related=["nodes/n0/accelerators/2"]),
        event(6, "GRANT", "grant replicas/trainer-5"),
        event(7, "DONE", "hand-over took 0.4 s", before="LOADING"),
    ]
    await view._read()
    await view._read()
    assert [text for _, text in view._decisions] == [
        "TRAINING_BOUND: rollout waits for training (nodes/n0/accelerators/2)"
    ]


async def test_a_scheduler_that_is_away_is_said_to_be_away_and_keeps_the_last_step(view):
    view.run = "runs/train"
    view.client.run.policies[0].head.number = 7
    await view._read()
    view.client.down = True
    await view._read()
    assert view.last.step == 7
    assert "the scheduler does not answer" in live.line(view.last)
    view.console.print(view.render())
    assert "does not answer" in view.console.file.getvalue()


async def test_without_a_terminal_it_prints_plain_lines(view):
    view.phase = "eval before"
    view.start()
    while "eval before" not in view.console.file.getvalue():
        await asyncio.sleep(0)
    await asyncio.wait_for(view.stop(), 5)
    assert "eval before step 0 reward - 0 tok/s | queue+running empty" in view.console.file.getvalue()


# ---- a job and its end


@pytest.fixture
def driver(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "POLL_SECONDS", 0.0)
    made = demo.Demonstration(Options(steps=3), tmp_path, Console(file=io.StringIO(), width=200))
    made.folder.mkdir(parents=True)
    return made


def fake_cluster():
    return SimpleNamespace(failure=asyncio.get_running_loop().create_future())


async def test_a_job_without_progress_ends_with_the_schedulers_explanation(driver, view, monkeypatch):
    monkeypatch.setattr(demo, "STALL_SECONDS", 0.0)
    with pytest.raises(demo.Stalled, match="made no progress") as stalled:
        await driver._one(fake_cluster(), view.client, view, "train", "train", wire.Run(), 60.0)
    assert "no rollout engine serves since 4 s" in str(stalled.value)
    assert "HOLD: 16 groups are wanted, 3 are ready" in str(stalled.value)
    assert json.loads((driver.folder / "demo.json").read_text())["train_run"] == "runs/train"


async def test_a_job_that_takes_too_long_ends_although_it_moves(driver, view):
    class Busy(FakeClient):
        async def get_run(self, name):
            self.run.policies[0].head.number += 1
            return self.run

    with pytest.raises(demo.Stalled, match="did not end within 0 s"):
        await driver._one(fake_cluster(), Busy(), view, "train", "train", wire.Run(), 0.0)


@pytest.mark.parametrize("state", [wire.RUN_STATE_PAUSED, wire.RUN_STATE_CANCELLED])
async def test_a_job_that_was_paused_or_cancelled_ends(driver, view, state):
    view.client.run.state = state
    with pytest.raises(demo.Stalled, match="over before its end"):
        await driver._one(fake_cluster(), view.client, view, "train", "train", wire.Run(), 60.0)


async def test_a_process_that_is_given_up_ends_the_job(driver, view):
    cluster = fake_cluster()
    cluster.failure.set_result("trainer-0 ended with exit code 1")
    with pytest.raises(demo.ClusterFailed, match="trainer-0"):
        await driver._one(cluster, view.client, view, "train", "train", wire.Run(), 60.0)


async def test_what_runs_beside_a_job_ends_with_it_and_its_error_ends_the_job():
    ended = asyncio.Event()

    async def forever():
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def done():
        return None

    async def broken():
        raise LibraError("INTERNAL", "chaos is broken")

    await demo._beside(done(), forever())
    assert ended.is_set()
    with pytest.raises(LibraError, match="chaos is broken"):
        await demo._beside(forever(), broken())


def test_an_earlier_demonstration_is_set_aside_and_another_folder_is_not_touched(tmp_path):
    old = tmp_path / "demo"
    old.mkdir()
    (old / "demo.json").write_text("{}")
    demo.set_aside(old)
    assert not old.exists()
    assert [p.name.startswith("demo-20") for p in tmp_path.iterdir()] == [True]
    other = tmp_path / "thesis"
    other.mkdir()
    (other / "chapter.txt").write_text("dear")
    with pytest.raises(ConfigError, match="not empty, and not a demonstration's folder"):
        demo.set_aside(other)
    assert (other / "chapter.txt").exists()


def test_what_a_killed_launcher_left_is_set_aside_and_a_live_ones_folder_is_refused(tmp_path):
    old = tmp_path / "demo"
    old.mkdir()
    for name in ("demo.json", "cluster.json", ".launcher"):
        (old / name).write_text("{}")
    lock = claim(old)
    with pytest.raises(ConfigError, match=rf"a cluster runs here already \(launcher process {os.getpid()}\)"):
        demo.set_aside(old)
    os.close(lock)  # as the kernel does when its holder is killed
    demo.set_aside(old)
    assert not old.exists()


def test_a_bad_name_is_refused_before_anything_starts():
    with pytest.raises(ConfigError, match="--name"):
        demo.main(Options(name="../elsewhere"))


def test_a_missing_model_is_said_with_the_place_where_it_should_be(tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "MODEL", tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="nowhere"):
        demo.main(Options())


def test_only_the_chaos_job_has_a_failpoint_and_only_in_the_core_trainer():
    quiet, wild = demo.cluster_config(Options()), demo.cluster_config(Options(chaos=True, database="sqlite:///x.db"))
    assert not any(w.env for w in quiet.workers)
    assert [w.name for w in wild.workers if w.env] == ["trainer-0"]
    assert wild.scheduler.database == "sqlite:///x.db"


# ---- chaos


@pytest.fixture
def killer(tmp_path, monkeypatch):
    killed = []
    monkeypatch.setattr(chaos.os, "killpg", lambda pid, number: killed.append((pid, number)))
    monkeypatch.setattr(chaos, "POLL_SECONDS", 0.0)
    folder = SimpleNamespace(history=lambda who: tmp_path / f"{who}.jsonl")
    pids = {"scheduler": 10, "rollout-2": 12, "rollout-3": 13, "trainer-0": 20, "trainer-2": 22}
    cluster = SimpleNamespace(folder=folder, pid=pids.get, workers=lambda: {"trainer-0": 0, "trainer-2": 0})
    made = Chaos(cluster, FakeClient(), "runs/train", 20, lambda text: None)
    made.signals = killed
    made.path = tmp_path / "trainer-0.jsonl"
    return made


async def test_rollout_worker_with_most_work_is_killed_and_written_down(killer, tmp_path):
    killer.client.listed[wire.RESOURCE_KIND_WORKER] = [rollout("rollout-2", 9, 3), rollout("rollout-3", 9, 5)]
    assert await killer._rollout()
    assert killer.signals == [(13, signal.SIGKILL)]
    row = json.loads((tmp_path / "chaos.jsonl").read_text())
    assert (row["kind"], row["process"], row["pid"]) == ("killed", "rollout-3", 13)


async def test_idle_rollout_workers_are_spared_until_one_has_work(killer):
    killer.client.listed[wire.RESOURCE_KIND_WORKER] = [rollout("rollout-2", 9, 0)]
    assert not await killer._rollout()
    assert killer.signals == []


async def test_hybrid_trainer_is_killed_while_it_holds_a_replica(killer):
    def trainer(worker, state):
        spec = wire.ReplicaSpec(role=wire.ROLE_TRAINER)
        return wire.Resource(
            replica=wire.Replica(owner_session=f"workers/{worker}/sessions/1", state=state, desired=spec)
        )

    killer.client.listed[wire.RESOURCE_KIND_REPLICA] = [
        trainer("trainer-0", wire.REPLICA_STATE_ACTIVE),
        trainer("trainer-2", wire.REPLICA_STATE_STARTING),
    ]
    assert not await killer._hybrid_trainer()
    killer.client.listed[wire.RESOURCE_KIND_REPLICA][1].replica.state = wire.REPLICA_STATE_ACTIVE
    assert await killer._hybrid_trainer()
    assert killer.signals == [(22, signal.SIGKILL)]
    # without the core trainer it is the only one that trains
    del killer.client.listed[wire.RESOURCE_KIND_REPLICA][0]
    assert not await killer._hybrid_trainer()


async def test_the_next_kill_waits_for_a_step_after_the_last_one(killer):
    killer.client.run.policies[0].head.number = 6
    killer.client.listed[wire.RESOURCE_KIND_WORKER] = [rollout("rollout-2", 9, 3)]
    work = asyncio.create_task(killer.run())
    await asyncio.sleep(0.02)
    assert [k.process for k in killer.killed] == ["scheduler"]
    killer.client.run.policies[0].head.number = 8
    await asyncio.sleep(0.02)
    assert [k.process for k in killer.killed] == ["scheduler", "rollout-2"]
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)


async def test_core_trainer_is_killed_at_its_commit_and_again_if_it_had_published(killer):
    def write(*rows):
        with killer.path.open("a") as file:
            for kind, number in rows:
                file.write(json.dumps({"kind": kind, "version": [1, number]}, separators=(",", ":")) + "\n")

    write(("committed", 4), ("published", 4))
    waiting = asyncio.create_task(killer._core_trainer())
    await asyncio.sleep(0.01)
    assert killer.signals == [], "what was committed before is no reason"
    write(("committed", 5), ("published", 5))
    assert await asyncio.wait_for(waiting, 5) is False
    assert killer.signals == [(20, signal.SIGKILL)]
    again = asyncio.create_task(killer._core_trainer())
    await asyncio.sleep(0)
    write(("committed", 6))
    assert await asyncio.wait_for(again, 5) is True
    assert len(killer.signals) == 2


async def test_all_kills_are_done_by_steps_and_a_scheduler_that_is_away_is_waited_for(killer):
    killer.client.listed[wire.RESOURCE_KIND_WORKER] = [rollout("rollout-2", 9, 3)]
    killer.client.down = True
    work = asyncio.create_task(killer.run())
    await asyncio.sleep(0.01)
    assert killer.signals == []
    killer.client.down = False
    killer.client.run.policies[0].head.number = 19

    async def commit():
        while "core trainer between commit and publish" in killer.missing:
            with killer.path.open("a") as file:
                file.write('{"kind":"committed","version":[1,19]}\n')
            await asyncio.sleep(0.005)

    await asyncio.wait_for(asyncio.gather(work, commit()), 10)
    assert killer.missing == []
    assert sorted(k.process for k in killer.killed) == ["rollout-2", "scheduler", "scheduler", "trainer-0", "trainer-2"]
