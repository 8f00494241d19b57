"""The `libra` commands against a real scheduler with fake workers: tables, JSON, messages and exit codes."""

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import structlog
import yaml

from services.common import wire
from services.common.rpc.server import serve
from services.ops.__main__ import main
from tests.support.cluster import ROOT
from tests.support.cluster import environment as child_environment
from tests.support.robots import Cluster, small_fleet


class Environment(wire.ToolEnvServiceServicer):
    async def Describe(self, request: object, context: object) -> wire.DescribeResponse:
        return wire.DescribeResponse(environment="calculator", version="1", max_sessions=64, max_starting=64)


class Fleet:
    """A scheduler and robots on a loop in a thread, so that commands run here as they do for people."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.loop = asyncio.new_event_loop()
        self._up = threading.Event()
        self._down = asyncio.Event()
        self._failure: list[BaseException] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        assert self._up.wait(30)
        if self._failure:
            raise self._failure[0]

    def _serve(self) -> None:
        try:
            self.loop.run_until_complete(self._body())
        except BaseException as error:  # noqa: BLE001 - shown by the thread that waits
            self._failure.append(error)
            self._up.set()

    async def _body(self) -> None:
        add = wire.add_ToolEnvServiceServicer_to_server
        toolenv = await serve([(add, Environment())], "127.0.0.1:0", service_names=[])
        self.cluster = Cluster(self.folder, planner={"enabled": False}, environments={"calculator": toolenv.address})
        await self.cluster.start()
        async with small_fleet(self.cluster) as (_, _, core, hybrid, _):
            self.release = asyncio.Event()
            for robot in (core, hybrid):

                async def play(lease, robot=robot) -> None:
                    await self.release.wait()
                    await robot.one_turn(lease)

                robot.play = play
            self._up.set()
            await self._down.wait()
            self.release.set()
        await self.cluster.stop()
        await toolenv.stop(0)

    def do(self, work) -> object:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(20)

    def until(self, condition: Callable[[], object]) -> None:
        self.do(self.cluster.until(condition))

    def go_on(self) -> None:
        self.loop.call_soon_threadsafe(self.release.set)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self._down.set)
        self._thread.join(20)


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    item = Fleet(tmp_path)
    monkeypatch.setenv("LIBRA_SCHEDULER", item.cluster.address)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    yield item
    item.close()


@pytest.fixture
def libra(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., tuple[int, str, str]]]:
    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(list(arguments))
        out, err = capsys.readouterr()
        return code, out, err

    yield run
    structlog.reset_defaults()  # the command's log goes to this test's stderr


def write_run(folder: Path, **changes: object) -> Path:
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").touch()
    (folder / "tasks.jsonl").write_text('{"question": "1+1=?"}\n{"question": "1+2=?"}\n')
    content = {
        "run": "a", "kind": "EVAL", "model": "model", "tasks": "tasks.jsonl", "environment": {"type": "calculator"},
        "group_size": 1, **changes,
    }  # fmt: skip
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def test_a_run_is_submitted_looked_at_preempted_and_followed_to_its_end(fleet: Fleet, libra, tmp_path: Path) -> None:
    code, out, err = libra("run", str(write_run(tmp_path)), "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["name"] == "runs/a"
    fleet.until(lambda: fleet.cluster.states().get("LEASED") == 2)

    code, out, _ = libra("status")
    assert code == 0
    for word in ("runs", "ACTIVE", "n0/0", "CORE_TRAINING", "rollout-1#1", "trainer-0", "Queue"):
        assert word in out or word.title() in out
    document = json.loads(libra("status", "--json")[1])
    assert [r["name"] for r in document["runs"]] == ["runs/a"]
    assert len(document["accelerators"]) == 3
    assert document["queued_by_level"] == {}

    listed = json.loads(libra("trajectories", "list", "a", "--json")[1])
    assert len(listed) == 2
    name = listed[0]["name"]
    assert "LEASED" in libra("trajectories", "list", "a", "--state", "leased")[1]
    assert name in libra("trajectories", "show", name)[1]
    assert json.loads(libra("trajectories", "show", name, "--json")[1])["name"] == name
    assert libra("explain", name)[1].strip()
    assert json.loads(libra("explain", "n0/1", "--json")[1])["summary"].startswith("nodes/n0/accelerators/1")

    commands = json.loads(libra("preempt", name, "--json")[1])["commands"]
    assert commands[name].startswith("commands/")
    fleet.until(lambda: fleet.cluster.state.trajectories[name].lease_epoch >= 2)
    fleet.go_on()
    fleet.until(lambda: not {"QUEUED", "LEASED", "SCORED", "READY"} & fleet.cluster.states().keys())
    events = [
        json.loads(line) for line in libra("events", "--json", "--kind", "trajectory", "--limit", "500")[1].splitlines()
    ]
    assert {e["name"] for e in events} == {t["name"] for t in listed}
    assert any(e.get("reason", {}).get("text") for e in events)
    assert "DELIVERED" in libra("events", "--limit", "500")[1]


def test_an_accelerator_changes_sides_and_back(fleet: Fleet, libra) -> None:
    code, out, err = libra("reassign", "n0/2", "--to", "training", "--note", "test", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["state"] == "REASSIGNMENT_STATE_SUCCEEDED"
    assert fleet.cluster.state.accelerators["nodes/n0/accelerators/2"].role == "TRAINER"
    code, _, err = libra("reassign", "n0/2", "--to", "training")
    assert code == 2
    assert "serves training already" in err
    assert "SUCCEEDED" in libra("reassign", "nodes/n0/accelerators/2", "--to", "rollout")[1]
    code, _, err = libra("reassign", "n0/9", "--to", "rollout")
    assert code == 1
    assert "nodes/n0/accelerators/9" in err


def test_a_plan_is_shown_with_what_else_was_considered(fleet: Fleet, libra) -> None:
    document = json.loads(libra("plan", "--dry-run", "--json")[1])
    assert document["name"].startswith("plans/")
    assert document["reason"]["text"]
    assert "Layouts" in libra("plan", "--dry-run")[1]


def test_a_plan_of_whole_layouts_is_shown_with_its_kinds(libra, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    plan = wire.Plan(name="plans/p")
    kinds = ((wire.ROLE_TRAINER, 8, 3), (wire.ROLE_ROLLOUT, 1, 2), (wire.ROLE_ROLLOUT, 4, 5))
    for role, width, count in kinds:
        plan.chosen.replicas.add(role=role, accelerators=width, count=count, accelerator_type="a100")
    plan.alternatives.add(label="present").layout.replicas.add(
        role=wire.ROLE_TRAINER, accelerators=4, count=1, accelerator_type="a100"
    )
    move = plan.moves.add()
    move.sources.add(replica="replicas/rollout-1")
    move.targets.add().spec.accelerators.extend(["nodes/n0/accelerators/0", "nodes/n0/accelerators/1"])
    plan.refused.add(move=0, reason=wire.Reason(code="NO_WORKER", text="nobody"))
    monkeypatch.setattr("services.ops.commands.options.call", lambda *_: plan)
    code, out, _ = libra("plan", "--dry-run")
    assert code == 0
    assert "3x8 a100" in out
    assert "2xTP1 a100 + 5xTP4 a100" in out
    assert next(line.split()[1:4] for line in out.splitlines() if "present" in line) == ["1x4", "a100", "none"]
    assert "n0/0, n0/1" in out
    assert "move 0 refused" in out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"grop_size": 2}, "unknown key 'grop_size'; did you mean 'group_size'?"),
        ({"kind": "TRAIN", "group_size": 1}, "'group_size': a TRAIN run compares"),
        ({"model": "./nowhere"}, "'model': no folder"),
        ({"tasks": "nowhere.jsonl"}, "cannot read the task file"),
        ({"environment": {"type": "calculator", "address": "127.0.0.1:1"}}, "127.0.0.1:1 cannot be reached"),
        ({"kind": "TRAIN", "group_size": 2, "batch": {"groups": 1}}, "1 groups cannot be divided over up to 2"),
    ],
)
def test_a_wrong_run_ends_with_one_message_and_code_2_before_anything_starts(
    fleet: Fleet, libra, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    code, out, err = libra("run", str(write_run(tmp_path, **changes)))
    assert (code, out) == (2, "")
    assert err.startswith("libra: ")
    assert message in err
    assert fleet.cluster.state.runs == {}


def test_what_the_scheduler_refuses_is_said_in_the_runs_terms(fleet: Fleet, libra, tmp_path: Path) -> None:
    path = write_run(tmp_path)
    assert libra("run", str(path))[0] == 0
    code, out, err = libra("run", str(write_run(tmp_path, seed=5)), "--json")
    assert code == 2
    assert "run.yaml: the scheduler refused the run" in err
    assert "ALREADY_EXISTS" in json.loads(out)["error"]["message"]
    fleet.go_on()


def test_files_are_validated_without_a_scheduler(libra, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIBRA_SCHEDULER", "127.0.0.1:1")
    monkeypatch.chdir(tmp_path)
    assert "valid run file (run a: 2 tasks)" in libra("validate", str(write_run(tmp_path)))[1]
    document = json.loads(libra("validate", str(ROOT / "services/ops/assets/local.yaml"), "--json")[1])
    assert (document["kind"], document["valid"]) == ("cluster", True)
    code, _, err = libra("validate", str(tmp_path / "none.yaml"))
    assert (code, "cannot read the file" in err) == (2, True)
    (tmp_path / "tasks.jsonl").write_text("{}\n{\n")
    code, _, err = libra("validate", str(tmp_path / "run.yaml"))
    assert code == 2
    assert "tasks.jsonl:2: not valid JSON" in err


def test_no_scheduler_and_wrong_usage(libra, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.ops.commands.options.RETRY_FOR_S", 0.1)
    code, out, err = libra("status", "--scheduler", "127.0.0.1:1", "--json")
    assert code == 1
    assert "no scheduler answers at 127.0.0.1:1" in err
    assert json.loads(out)["error"]["reason"] == "UNAVAILABLE"
    assert libra("reassign", "n0/2", "--to", "sideways")[0] == 2
    assert libra("nonsense")[0] == 2
    assert libra("--help")[0] == 0
    code, _, err = libra("events", "--kind", "gpu")
    assert code == 2
    assert "expected one of node, accelerator" in err


def test_following_events_ends_with_an_interrupt(fleet: Fleet, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "services.ops", "events", "--follow", "--json", "--prefix", "runs/f"]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**child_environment(), "LIBRA_SCHEDULER": fleet.cluster.address},
    )  # fmt: skip
    assert process.stdout is not None
    fleet.do(fleet.cluster.create_run("f", ["{}"], kind=wire.RUN_KIND_EVAL, group_size=1))
    fleet.go_on()
    seen = []
    for line in process.stdout:
        seen.append(json.loads(line))
        if seen[-1].get("to_state") == "FINISHED":
            break
    process.send_signal(2)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    revisions = [int(e["revision"]) for e in seen]
    assert revisions == sorted(revisions)
