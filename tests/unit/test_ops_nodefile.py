"""Node files and what they need: variables in configuration files, collected histories of a cluster that runs."""

import json
from pathlib import Path

import pytest

from services.common import config
from services.common.errors import ConfigError
from services.node.config import NodeConfig
from services.ops import nodefile, target
from services.ops.__main__ import main
from services.ops.attached import AttachedCluster
from services.ops.target import Target
from services.scheduler.config import SchedulerConfig

ROOT = Path(__file__).resolve().parents[2]

NODE = """\
scheduler: ${LIBRA_SCHEDULER}
lighthouse: ${LIBRA_LIGHTHOUSE:-lighthouse:29510}
blobs: s3://bucket/libra
run_dir: RUN_DIR
host: 10.0.0.7
listen: 0.0.0.0
node:
  name: "${HOSTNAME}"
  accelerators:
    - {index: 0, pool: HYBRID, cpu_share: 0.2, memory_mib: 512}
workers:
  - {name: "rollout-${HOSTNAME}", kind: rollout, accelerators: [0]}
  - {name: "trainer-${HOSTNAME}", kind: trainer, accelerators: [0], settings: {collective: {timeout_s: 7}}}
"""


@pytest.fixture
def container(monkeypatch):
    """What a container of compose finds in its environment; its name is a number to a careless reader."""
    monkeypatch.setenv("LIBRA_SCHEDULER", "scheduler:7070")
    monkeypatch.setenv("HOSTNAME", "123456e78901")


def test_a_node_file_makes_the_configurations_of_its_services(tmp_path, container):
    path = tmp_path / "hybrid.yaml"
    path.write_text(NODE.replace("RUN_DIR", str(tmp_path / "run")))
    node = nodefile.load(path)
    found = {s.module: s for s in node.services()}
    assert list(found) == ["services.rollout", "services.trainer", "services.node"]
    rollout, trainer = found["services.rollout"].content, found["services.trainer"].content
    assert (rollout["worker"], rollout["listen"], rollout["scheduler"]) == (
        "rollout-123456e78901", "0.0.0.0:0", "scheduler:7070",
    )  # fmt: skip
    assert trainer["collective"] == {"lighthouse": "lighthouse:29510", "host": "10.0.0.7", "timeout_s": 7}
    assert trainer["accelerators"] == ["nodes/123456e78901/accelerators/0"]
    agent = config.load(found["services.node"].write(node.folder), NodeConfig)
    # in a container everything goes to one output
    assert [w.log for w in agent.workers] == ["", ""]
    assert agent.locks == str(tmp_path / "run" / "locks")


def test_a_node_file_without_a_lighthouse_cannot_have_trainers(tmp_path, container):
    path = tmp_path / "n.yaml"
    path.write_text("\n".join(row for row in NODE.splitlines() if not row.startswith("lighthouse")))
    with pytest.raises(ConfigError, match="'lighthouse' is missing; trainer workers"):
        nodefile.load(path)


def test_a_node_file_with_a_wrong_setting_is_refused_before_anything_starts(tmp_path, container):
    path = tmp_path / "n.yaml"
    path.write_text(NODE.replace("timeout_s: 7", "timout_s: 7"))
    with pytest.raises(
        ConfigError, match=r"workers\[trainer-123456e78901\].settings: unknown key 'collective.timout_s"
    ):
        nodefile.load(path)


def test_validate_knows_a_node_file(tmp_path, container, capsys):
    path = tmp_path / "n.yaml"
    path.write_text(NODE)
    assert main(["validate", str(path)]) == 0
    assert "valid node file (node 123456e78901: 1 accelerators, 2 workers)" in capsys.readouterr().out
    path.write_text(NODE.replace("blobs:", "blobz:"))
    assert main(["validate", str(path)]) == 2
    assert "unknown key 'blobz'; did you mean 'blobs'?" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["rollout", "trainer", "hybrid"])
def test_the_node_files_of_compose_are_accepted(name, container, monkeypatch):
    monkeypatch.setenv("LIBRA_LIGHTHOUSE", "lighthouse:29510")
    monkeypatch.setenv("LIBRA_BLOBS", "/var/lib/libra/blobs")
    node = nodefile.load(ROOT / "deploy" / "config" / f"{name}.yaml")
    assert node.folder.path == Path("/var/lib/libra/nodes/123456e78901")
    assert len(node.workers) == (2 if name == "hybrid" else 1)


def test_the_schedulers_file_of_compose_is_accepted(monkeypatch):
    monkeypatch.delenv("LIBRA_BLOBS", raising=False)
    settings = config.load(ROOT / "deploy" / "config" / "scheduler.yaml", SchedulerConfig)
    assert settings.database == "postgresql://libra@postgres:5432/libra"
    assert (settings.level("nodes/x/accelerators/0", "CORE_ROLLOUT"), settings.level("nodes/x", "HYBRID")) == (1, 0)
    assert settings.concurrency_cap("nodes/x/accelerators/0", "HYBRID") == 56


# ---- variables


def test_a_variable_without_value_names_file_and_line():
    with pytest.raises(ConfigError, match=r"n.yaml:2: the environment variable NOWHERE_SET is not set; set it, or"):
        config.interpolate("a: 1\nb: ${NOWHERE_SET}\n", {}, "n.yaml")


def test_defaults_dollar_signs_and_comments():
    text = "a: ${A:-1}\nb: ${B:-}\n# ${C}\nc: $$HOME $HOME\n"
    assert config.interpolate(text, {"A": ""}, "n") == "a: 1\nb: \n# ${C}\nc: $HOME $HOME\n"
    assert config.interpolate("a: ${A:-1}", {"A": "2"}, "n") == "a: 2"


def test_an_accelerator_is_looked_up_before_its_pool():
    settings = SchedulerConfig(
        levels={"HYBRID": 2, "nodes/a/accelerators/0": 3}, concurrency_caps={"HYBRID": 5}, default_concurrency_cap=9
    )
    assert settings.level("nodes/a/accelerators/0", "HYBRID") == 3
    assert settings.level("nodes/b/accelerators/0", "HYBRID") == 2
    assert settings.level("nodes/b/accelerators/0", "CORE_ROLLOUT") == 0
    assert settings.concurrency_cap("nodes/b/accelerators/0", "CORE_ROLLOUT") == 9
    with pytest.raises(ConfigError, match="'HYBRYD' is neither an accelerator"):
        config.loads("levels: {HYBRYD: 1}", SchedulerConfig, "s.yaml")


# ---- a cluster that runs already


def test_a_named_scheduler_is_found_with_what_the_environment_says_of_it(monkeypatch):
    monkeypatch.delenv("LIBRA_SCHEDULER", raising=False)
    assert target.elsewhere(None) is None
    monkeypatch.setenv("LIBRA_SCHEDULER", "scheduler:7070")
    monkeypatch.setenv("LIBRA_BLOBS", "s3://b")
    monkeypatch.setenv("LIBRA_NODES", "/nodes")
    assert target.elsewhere(None) == Target("scheduler:7070", "s3://b", {}, "/nodes")
    assert target.elsewhere("other:1").scheduler == "other:1"


def test_what_the_checker_needs_must_be_seen_from_here(tmp_path):
    with pytest.raises(ConfigError, match="set LIBRA_BLOBS"):
        AttachedCluster.check(Target("s:1"))
    with pytest.raises(ConfigError, match="set LIBRA_NODES"):
        AttachedCluster.check(Target("s:1", blobs="b", nodes=str(tmp_path / "gone")))
    AttachedCluster.check(Target("s:1", blobs="b", nodes=str(tmp_path)))


async def test_only_what_concerns_the_job_is_collected(tmp_path):
    history = tmp_path / "nodes" / "n1" / "history"
    history.mkdir(parents=True)
    rows = [
        {"t": 5.0, "who": "w", "kind": "started"},
        {"t": 11.0, "who": "w", "kind": "started"},
        {"t": 12.0, "who": "w", "kind": "acked", "trajectory": "runs/a/trajectories/1"},
        {"t": 12.0, "who": "w", "kind": "acked", "trajectory": "runs/b/trajectories/1"},
        {"t": 13.0, "who": "w", "kind": "taken", "manifest": "runs/a/manifests/1", "step": 1},
        {"t": 13.0, "who": "w", "kind": "loaded", "run": "runs/b", "version": [1, 2]},
    ]
    (history / "w.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"t": 14.0, "who"')
    cluster = AttachedCluster(Target("s:1", nodes=str(tmp_path / "nodes")), tmp_path / "run")
    cluster.collect(["runs/a"], since=10.0)
    found = [json.loads(row) for row in (tmp_path / "run" / "history" / "n1-w.jsonl").read_text().splitlines()]
    assert found == [rows[1], rows[2], rows[4]]
    assert not (tmp_path / "run" / "metrics").exists()
