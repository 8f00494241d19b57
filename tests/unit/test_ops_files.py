"""Cluster files and run files: what is wrong is said with file, line and what to do, before anything starts."""

import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import yaml

from services.common import config, wire
from services.common.errors import ConfigError
from services.common.rpc.server import serve
from services.node.config import NodeConfig
from services.ops import clusterfile, runcheck, runfile, target
from services.ops.clusterfile import Addresses, ClusterConfig, RunFolder
from services.ops.runfile import RunConfig

RUN = """\
run: my-run
model: ./model
tasks: tasks.jsonl
environment: {type: calculator, address: "127.0.0.1:1"}
group_size: 4
batch:
  groups: 6
"""


def cluster(**changes: object) -> ClusterConfig:
    content = yaml.safe_load(clusterfile.LOCAL.read_text()) | changes
    return config.loads(yaml.safe_dump(content), ClusterConfig, "c.yaml")


def run(text: str = RUN, source: str = "r.yaml") -> RunConfig:
    return config.loads(text, RunConfig, source)


# ---- cluster files


def test_a_file_of_rates_is_found_beside_the_cluster_file_and_read_before_anything_starts(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    content = yaml.safe_load(clusterfile.LOCAL.read_text())
    path.write_text(yaml.safe_dump(content | {"scheduler": {"planner": {"rates": "rates.yaml"}}}))
    with pytest.raises(ConfigError, match=r"rates.yaml: cannot read the configuration file"):
        clusterfile.load(path)
    engines = [{"type": "cpu", "tp": 1, "step_s": 0.01, "sequence_s": 0.0, "context_s": 0.0, "kv_tokens": 4096}]
    trainers = [{"type": "cpu", "accelerators": 1, "token_s": 0.001}]
    (tmp_path / "rates.yaml").write_text(yaml.safe_dump({"engines": engines, "trainers": trainers}))
    services = clusterfile.services(clusterfile.load(path), RunFolder(tmp_path / "run"), Addresses())
    scheduler = next(s for s in services if s.name == "scheduler").content
    assert scheduler["planner"]["rates"] == str(tmp_path / "rates.yaml")


def test_the_local_cluster_is_what_it_says(tmp_path: Path) -> None:
    found = clusterfile.services(
        cluster(), RunFolder(tmp_path), Addresses("127.0.0.1:7", "http://127.0.0.1:8", {"e": "x:1"})
    )
    names = [s.name for s in found]
    assert names == [
        "toolenv-calculator", "lighthouse", "scheduler", "trainer-0", "rollout-1", "rollout-2", "rollout-3",
        "trainer-2", "trainer-3", "node-n0",
    ]  # fmt: skip
    by_name = {s.name: s.content for s in found}
    assert by_name["scheduler"]["levels"] == {
        "nodes/n0/accelerators/1": 1, "nodes/n0/accelerators/2": 0, "nodes/n0/accelerators/3": 0
    }  # fmt: skip
    assert by_name["scheduler"]["environments"] == {"e": "x:1"}
    assert by_name["scheduler"]["database"] == f"sqlite:///{tmp_path}/libra.db"
    assert by_name["rollout-2"]["accelerators"] == ["nodes/n0/accelerators/2"]
    assert by_name["rollout-2"]["cpu_share"] == 0.2
    assert by_name["trainer-2"]["collective"] == {"lighthouse": "http://127.0.0.1:8"}
    # what is written is what the agent reads
    node = next(s for s in found if s.name == "node-n0")
    read = config.load(node.write(RunFolder(tmp_path)), NodeConfig)
    assert [w.name for w in read.workers] == [n for n in names if n.startswith(("trainer", "rollout"))]
    assert read.workers[0].argv[1:3] == ["-m", "services.trainer"]
    assert read.workers[0].env["OMP_WAIT_POLICY"] == "PASSIVE"


def test_a_tool_environment_elsewhere_is_named_to_the_scheduler_and_not_started(tmp_path: Path) -> None:
    found = clusterfile.services(
        cluster(toolenvs=[{"environment": "mine", "address": "10.0.0.1:9"}]), RunFolder(tmp_path), Addresses()
    )
    assert not [s for s in found if s.module == "services.toolenv"]
    assert next(s.content for s in found if s.name == "scheduler")["environments"] == {"mine": "10.0.0.1:9"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"toolenvs": [{"environment": "a"}]}, "expected either listen"),
        ({"workers": [{"name": "w", "kind": "rollout", "node": "n9", "accelerators": [0]}]}, "'n9' is not one of n0"),
        (
            {"workers": [{"name": "w", "kind": "rollout", "node": "n0", "accelerators": [7]}]},
            r"\[7\] are not on node n0",
        ),
        ({"workers": [{"name": "scheduler", "kind": "rollout", "node": "n0", "accelerators": [0]}]}, "named twice"),
        ({"workers": [{"name": "w", "kind": "judge", "node": "n0", "accelerators": [0]}]}, "'rollout' or 'trainer'"),
        ({"scheduler": {"ready_file": "x"}}, "set by the launcher"),
        ({"scheduler": {"cycle_s": "soon"}}, "scheduler.cycle_s"),
    ],
)
def test_a_contradiction_in_a_cluster_file_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cluster(**changes)


def test_case_53_an_unknown_key_names_file_line_and_nearest_key(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(clusterfile.LOCAL.read_text().replace("  listen: 127.0.0.1:7070", "  lisen: 127.0.0.1:7070"))
    line = path.read_text().splitlines().index("  lisen: 127.0.0.1:7070") + 1
    with pytest.raises(ConfigError, match=rf"c.yaml:{line}: unknown key 'scheduler.lisen'; did you mean 'listen'\?"):
        clusterfile.load(path)


def test_case_53_a_wrong_setting_of_a_service_is_found_before_it_starts() -> None:
    worker = {"name": "w", "kind": "trainer", "node": "n0", "accelerators": [0], "settings": {"dtyp": "float32"}}
    with pytest.raises(ConfigError, match=r"c.yaml: workers\[w\].settings: unknown key 'dtyp'"):
        clusterfile.check(cluster(workers=[worker], toolenvs=[]), "c.yaml")


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        with pytest.raises(
            ConfigError, match=rf"scheduler.listen: port {port} on 127.0.0.1 cannot be used \(address alr"
        ):
            clusterfile.check_listen("scheduler.listen", f"127.0.0.1:{port}")
    clusterfile.check_listen("scheduler.listen", f"127.0.0.1:{port}")
    clusterfile.check_listen("scheduler.listen", "127.0.0.1:0")
    for wrong in ("127.0.0.1", "7070", "127.0.0.1:http", "127.0.0.1:99999"):
        with pytest.raises(ConfigError, match="is no address"):
            clusterfile.check_listen("scheduler.listen", wrong)


# ---- run files


def test_a_run_file_becomes_a_run(tmp_path: Path) -> None:
    text = RUN + (
        "  multiple_of: 3\nalgorithm: {name: grpo, settings: {clip_low: 0.2}}\n"
        "staleness: {max_versions: 0, on_exceed: DROP_GROUP}\non_void: {action: SHRINK, min_members: 2}\n"
        "failures: [{failure: EPISODE, action: VOID}]\nmin_reward_spread: 0\n"
        "limits: {max_generated_tokens: 64, max_run_time_s: 60}\nsampling: {temperature: 0}\nseed: 0\nepochs: 2\n"
    )
    found = runfile.message(
        run(text), tmp_path / "r.yaml", wire.BlobRef(uri="file:///t", sha256="0" * 64, size_bytes=1)
    )
    assert found.policies[0].model == str(tmp_path / "model")
    assert (found.batch.groups, found.batch.multiple_of, found.group_size) == (6, 3, 4)
    assert found.algorithm.settings["clip_low"] == 0.2
    assert found.staleness.HasField("max_versions")
    assert found.staleness.max_versions == 0
    assert found.sampling.HasField("temperature")
    assert found.filter.HasField("min_reward_spread")
    assert found.HasField("seed")
    assert found.failure_rules[0].failure == wire.FAILURE_CLASS_EPISODE
    assert found.tool_envs[0].endpoint == "127.0.0.1:1"
    assert found.limits.max_run_time.seconds == 60


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (RUN.replace("group_size", "group_sise"), r"r.yaml:5: unknown key 'group_sise'; did you mean 'group_size'\?"),
        (RUN.replace("group_size: 4", "group_size: 1"), r"r.yaml:5: 'group_size': a TRAIN run compares the members"),
        (RUN.replace("group_size: 4", "group_size: four"), r"r.yaml:5: 'group_size': .*integer.*'four'"),
        (RUN + "  multiple_of: 4\n", r"r.yaml:8: 'batch.multiple_of': groups is 6, not a multiple of 4"),
        (RUN + "  min_groups: 7\n", r"r.yaml:8: 'batch.min_groups': above groups, which is 6"),
        (RUN.replace("run: my-run", "run: My Run"), r"r.yaml:1: 'run'"),
        (RUN.replace("model: ./model\n", ""), r"'model' is missing"),
        (
            RUN + "on_void: {action: SHRINK, min_members: 5}\n",
            r"r.yaml:8: 'on_void': min_members is 5, above group_size 4",
        ),
        (RUN + "a: [\n", r"r.yaml:\d+: not valid YAML"),
    ],
)
def test_case_53_and_54_a_wrong_run_file_is_refused_with_its_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(text)


def test_group_size_one_is_right_for_evaluation() -> None:
    assert run(RUN.replace("group_size: 4", "kind: EVAL\ngroup_size: 1")).group_size == 1


def test_bad_lines_of_a_task_file_are_named_by_number_without_their_text(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(b'{"question": "1"}\n{"question": "secret}\n[1]\n\n\xff\n{"question": "2"}\n')
    before = path.read_bytes()
    with pytest.raises(ConfigError) as refusal:
        runcheck.tasks(path)
    lines = str(refusal.value).splitlines()
    assert [line.split(": ")[0] for line in lines] == [f"{path}:{n}" for n in (2, 3, 4, 5)]
    assert "not valid JSON at column 14" in lines[0]
    assert "found a list" in lines[1]
    assert "secret" not in str(refusal.value)
    assert path.read_bytes() == before
    path.write_text("\n".join(["x"] * 9))
    with pytest.raises(ConfigError, match="and 4 more bad lines"):
        runcheck.tasks(path)
    path.write_text("\n")
    with pytest.raises(ConfigError, match="no tasks"):
        runcheck.tasks(path)
    with pytest.raises(ConfigError, match="cannot read the task file"):
        runcheck.tasks(tmp_path / "none.jsonl")
    path.write_text('{"q": 1}\n{"q": 22}\n\n')
    assert (runcheck.tasks(path).count, runcheck.tasks(path).longest) == (2, '{"q": 22}')


def test_a_missing_model_is_refused_and_a_hub_name_is_left_to_the_workers(tmp_path: Path) -> None:
    source = tmp_path / "r.yaml"
    with pytest.raises(ConfigError, match=r"'model': no folder .*/model; expected one in Hugging Face format"):
        runcheck.model(run(), source)
    (tmp_path / "model").mkdir()
    with pytest.raises(ConfigError, match="the weights are missing"):
        runcheck.model(run(), source)
    (tmp_path / "model" / "model.safetensors").touch()
    with pytest.raises(ConfigError, match=r"config.json cannot be read"):
        runcheck.model(run(), source)
    (tmp_path / "model" / "config.json").write_text('{"max_position_embeddings": 8}')
    assert runcheck.model(run(), source) == {"max_position_embeddings": 8}
    hub = run(RUN.replace("./model", "Qwen/Qwen3-0.6B"))
    assert runcheck.model(hub, source) == {}
    assert runfile.message(hub, source, wire.BlobRef()).policies[0].model == "Qwen/Qwen3-0.6B"


def test_case_54_a_batch_that_cannot_divide_over_the_replicas_is_refused_with_both_numbers() -> None:
    accelerators = [
        wire.Accelerator(pool=p) for p in (wire.POOL_CORE_TRAINING, wire.POOL_HYBRID, wire.POOL_CORE_ROLLOUT)
    ]
    runcheck.replicas(run(), Path("r.yaml"), accelerators)
    small = run(RUN.replace("groups: 6", "groups: 1"))
    with pytest.raises(ConfigError, match=r"1 groups cannot be divided over up to 2 trainer replicas"):
        runcheck.replicas(small, Path("r.yaml"), accelerators)
    with pytest.raises(ConfigError, match="no accelerator in pool"):
        runcheck.replicas(run(), Path("r.yaml"), [wire.Accelerator(pool=wire.POOL_CORE_ROLLOUT)])


# ---- environments


def _add_nothing(servicer: object, server: object) -> None:
    """A server without our service."""


class Environment(wire.ToolEnvServiceServicer):
    def __init__(self) -> None:
        self.open: set[str] = set()
        self.opened = 0

    async def Describe(self, request: object, context: object) -> wire.DescribeResponse:
        return wire.DescribeResponse(environment="calculator", version="2")

    async def OpenSession(self, request: wire.OpenSessionRequest, context: object) -> wire.OpenSessionResponse:
        self.opened += 1
        self.open.add("sessions/1")
        return wire.OpenSessionResponse(session="sessions/1", observation=json.loads(request.task_json)["question"])

    async def CloseSession(self, request: wire.CloseSessionRequest, context: object) -> wire.CloseSessionResponse:
        self.open.discard(request.session)
        return wire.CloseSessionResponse()


@asynccontextmanager
async def environment(add=wire.add_ToolEnvServiceServicer_to_server) -> AsyncIterator[tuple[Environment, str]]:
    servicer = Environment()
    server = await serve([(add, servicer)], "127.0.0.1:0", service_names=[])
    try:
        yield servicer, server.address
    finally:
        await server.stop(0)


async def test_an_environment_is_asked_what_it_is() -> None:
    source = Path("r.yaml")
    async with environment() as (_, address):
        await runcheck.environment(run(), source, address)
        await runcheck.environment(
            run(RUN.replace("type: calculator", "type: calculator, version: '2'")), source, address
        )
        with pytest.raises(ConfigError, match="is environment 'calculator'; the run wants 'python'"):
            await runcheck.environment(run(RUN.replace("calculator", "python")), source, address)
        with pytest.raises(ConfigError, match="has version '2'; the run wants '3'"):
            await runcheck.environment(
                run(RUN.replace("type: calculator", "type: calculator, version: '3'")), source, address
            )
    with pytest.raises(ConfigError, match=r"127.0.0.1:1 cannot be reached: .*; start the environment"):
        await runcheck.environment(run(), source, "127.0.0.1:1")
    async with environment(_add_nothing) as (_, address):
        with pytest.raises(ConfigError, match=r"answers, but not as libra.v1.ToolEnvService"):
            await runcheck.environment(run(), source, address)


def test_an_environment_is_found_by_address_else_in_the_cluster() -> None:
    source = Path("r.yaml")
    assert runcheck.environment_address(run(), source, {"calculator": "x:2"}) == "127.0.0.1:1"
    named = run(RUN.replace(', address: "127.0.0.1:1"', ""))
    assert runcheck.environment_address(named, source, {"calculator": "x:2"}) == "x:2"
    assert runcheck.environment_address(named, source, {}) == ""
    with pytest.raises(ConfigError, match="'nowhere' is no address"):
        runcheck.environment_address(run(RUN.replace("127.0.0.1:1", "nowhere")), source, {})


async def test_a_prompt_longer_than_the_context_is_refused_and_leaves_no_session(tmp_path: Path) -> None:
    from tests.support.tiny_model import write_tokenizer

    source = tmp_path / "r.yaml"
    (tmp_path / "model").mkdir()
    write_tokenizer(tmp_path / "model")
    details = {"max_position_embeddings": 12}
    async with environment() as (servicer, address):
        await runcheck.prompt(run(), source, details, '{"question": "1+2=?"}', address)
        with pytest.raises(ConfigError, match="prompt of the longest task has 13 tokens, but the context has 12"):
            await runcheck.prompt(run(), source, details, '{"question": "1+2+3+4+5+6=?"}', address)
        assert servicer.opened == 2
        assert servicer.open == set()
        await runcheck.prompt(run(), source, {}, '{"question": "1+2+3+4+5+6=?"}', address)


# ---- which scheduler


def test_the_scheduler_is_found_by_option_variable_cluster_or_default(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delenv("LIBRA_SCHEDULER", raising=False)
    current = tmp_path / "cluster.json"
    assert target.find(None, current) == target.Target("127.0.0.1:7070")
    current.write_text(json.dumps({"scheduler": "127.0.0.1:5", "blobs": "/b", "toolenvs": {"e": "x:1"}}))
    assert target.find(None, current) == target.Target("127.0.0.1:5", "/b", {"e": "x:1"})
    assert target.find("127.0.0.1:5", current).blobs == "/b"
    assert target.find("127.0.0.1:6", current) == target.Target("127.0.0.1:6")
    monkeypatch.setenv("LIBRA_SCHEDULER", "127.0.0.1:8")
    assert target.find(None, current) == target.Target("127.0.0.1:8")
    current.write_text("{")
    monkeypatch.delenv("LIBRA_SCHEDULER")
    assert target.find(None, current).scheduler == "127.0.0.1:7070"


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        ("{name: grpoo}", "'grpoo' is not an algorithm of this trainer; it knows 'grpo'"),
        ("{settings: {clip_lo: 0.1}}", "unknown key 'clip_lo'; did you mean 'clip_low'?"),
        ("{settings: {learning_rate: fast}}", "learning_rate"),
    ],
)
def test_an_algorithm_the_trainer_would_refuse_is_refused_in_the_file(algorithm: str, said: str) -> None:
    with pytest.raises(ConfigError, match=r"r\.yaml:8") as caught:
        run(RUN + f"algorithm: {algorithm}\n")
    assert said in str(caught.value)
