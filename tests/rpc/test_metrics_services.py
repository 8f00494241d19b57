"""Workers, tool environments and node agents serve what they count, from their own start to their own end."""

import asyncio
import os
import signal
import socket
import sys
import urllib.error
from types import SimpleNamespace

import pytest

from services.common import wire
from services.node import bootstrap as node
from services.node.config import NodeConfig
from services.node.exposition import expose as expose_node
from services.rollout import bootstrap as rollout
from services.rollout.config import RolloutConfig
from services.rollout.engine.fake import FakeCore
from services.rollout.engine.thread import Engine
from services.rollout.exposition import expose as expose_rollout
from services.toolenv import bootstrap as toolenv
from services.toolenv.config import ToolEnvConfig
from services.toolenv.envs.base import CallResult, InfraError, Outcome, ScoreResult
from services.toolenv.exposition import expose as expose_toolenv
from services.trainer import bootstrap as trainer
from services.trainer.config import Config
from services.trainer.exposition import expose as expose_trainer
from services.trainer.version import Version
from tests.rpc.test_rollout_agent import make_fleet
from tests.rpc.test_toolenv_service import Scripted, call, opened, serving
from tests.support.expositions import node_agent, now, samples, scrape, trainer_agent, value

__all__ = ["make_fleet"]


async def test_a_rollout_worker_counts_episodes_tokens_and_tool_calls(make_fleet):
    fleet = await make_fleet()
    exposition = expose_rollout(fleet.agent)
    asleep = now(exposition)
    assert value(asleep, "libra_rollout_generated_tokens_total") == 0
    assert not [name for name, _ in asleep if name == "libra_rollout_weight_version"]
    await fleet.ready()
    await fleet.load(number=3)
    await fleet.desire(fleet.lease())
    assert value(now(exposition), "libra_rollout_episodes_running") == 1
    await fleet.quiet()
    load = await fleet.agent.engine_load(fleet.agent.holding)
    seen = now(exposition)
    assert value(seen, "libra_rollout_generated_tokens_total") == load.generated_tokens > 0
    assert value(seen, "libra_rollout_episodes_running") == 0
    assert value(seen, "libra_rollout_episodes_total", outcome="reward") == 1
    assert value(seen, "libra_rollout_weight_version", run="r") == 3
    ran = len(fleet.world.env.executed)
    assert ran > 0
    assert value(seen, "libra_rollout_tool_calls_total", tool="calculate", outcome="ok") == ran
    assert value(seen, "libra_rollout_tool_call_seconds_count", tool="calculate") == ran
    await fleet.agent.on_session_lost("the test says so")
    seen = now(exposition)
    assert value(seen, "libra_rollout_generated_tokens_total") == load.generated_tokens, "counters go on"
    assert value(seen, "libra_rollout_kv_capacity_tokens") == 0


async def test_a_broken_environment_is_seen_by_the_worker(make_fleet):
    fleet = await make_fleet()
    fleet.world.env.outcome = wire.TOOL_OUTCOME_INFRA_ERROR
    await fleet.ready()
    await fleet.desire(fleet.lease())
    await fleet.quiet()
    seen = now(expose_rollout(fleet.agent))
    assert value(seen, "libra_rollout_episodes_total", outcome="environment") == 1
    # nothing has asked the environment yet which tools it has
    assert value(seen, "libra_rollout_tool_calls_total", tool="unknown", outcome="infra_error") == 1


async def test_a_tool_environment_counts_calls_by_offered_tools_only():
    environment = Scripted()
    environment.gate.set()
    async with serving(environment) as (stub, service, _):
        exposition = expose_toolenv("scripted", service.tally, service._table)
        assert value(now(exposition), "libra_toolenv_sessions", environment="scripted") == 0
        session = await opened(stub)
        await call(stub, session, "a", tool="do")
        await call(stub, session, "a", tool="do")  # the stored result: no second call
        for made_up in ("rm", "x" * 1000):
            await call(stub, session, made_up[:100], tool=made_up)
        environment.result = InfraError("broken")
        await call(stub, session, "b", tool="do")
        environment.result = CallResult(Outcome.TIMEOUT, "")
        await call(stub, session, "c", tool="do")
        environment.reward = ScoreResult(Outcome.INFRA_ERROR)
        await stub.Score(wire.ScoreRequest(session=session, epoch=1), timeout=20)
        seen = now(exposition)
    calls = {labels: v for (name, labels), v in seen.items() if name == "libra_toolenv_calls_total" and v}
    assert calls == {
        (("outcome", "ok"), ("tool", "do")): 1,
        (("outcome", "tool_error"), ("tool", "unknown")): 2,
        (("outcome", "infra_error"), ("tool", "do")): 1,
        (("outcome", "timeout"), ("tool", "do")): 1,
    }
    assert value(seen, "libra_toolenv_call_seconds_count", tool="do") == 3
    assert value(seen, "libra_toolenv_sessions", environment="scripted") == 1
    for during, count in (("open", 0), ("call", 1), ("score", 1)):
        assert value(seen, "libra_toolenv_infra_errors_total", during=during) == count


async def test_a_call_that_its_session_took_along_is_no_failure():
    environment = Scripted()
    async with serving(environment) as (stub, service, _):
        session = await opened(stub)
        await call(stub, session, "a", tool="do", timeout=0.5)  # still running
        await stub.CloseSession(wire.CloseSessionRequest(session=session, epoch=1), timeout=20)
        seen = now(expose_toolenv("scripted", service.tally, service._table))
    assert not [labels for (name, labels), v in seen.items() if name == "libra_toolenv_calls_total" and v]
    assert value(seen, "libra_toolenv_infra_errors_total", during="call") == 0


async def test_a_trainer_shows_its_steps_and_the_newest_batch(tmp_path):
    agent = trainer_agent(tmp_path)
    exposition = expose_trainer(agent)
    assert value(now(exposition), "libra_trainer_participants") == 0
    with agent.phases.phase(wire.TRAINER_PHASE_TRAIN):
        agent.phases.trained_tokens, agent.phases.steps, agent.phases.participants = 100, 2, 3
    policy = SimpleNamespace(
        run=wire.Run(name="runs/r"), version=Version(1, 7), metrics={"reward_mean": 0.25, "tokens": 1.0}
    )
    agent.loop = SimpleNamespace(policy=policy)
    seen = now(exposition)
    assert value(seen, "libra_trainer_steps_total") == 2
    assert value(seen, "libra_trainer_tokens_total") == 100
    assert value(seen, "libra_trainer_participants") == 3
    assert value(seen, "libra_trainer_version", run="r") == 7
    assert value(seen, "libra_trainer_batch_reward_mean", run="r") == 0.25
    assert value(seen, "libra_trainer_phase_seconds_total", phase="train") > 0
    policy.metrics = {}
    agent.loop.policy = None
    assert not [name for name, _ in now(exposition) if name == "libra_trainer_version"]


async def test_a_node_agent_shows_what_it_measured_and_its_workers(tmp_path):
    agent = node_agent(tmp_path)
    exposition = expose_node(agent)
    assert value(now(exposition), "libra_node_accelerator_free_memory_bytes", accelerator="n0/0") is None
    agent.measure()
    agent.workers.by_name["w"].restarts = 2
    seen = now(exposition)
    for name in ("libra_node_accelerator_memory_bytes", "libra_node_accelerator_free_memory_bytes"):
        assert value(seen, name, accelerator="n0/0") == 512 << 20
    assert value(seen, "libra_node_accelerator_held_generation", accelerator="n0/0") == 0
    assert value(seen, "libra_node_workers", state="idle") == 1
    assert value(seen, "libra_node_workers", state="ready") == 0
    assert value(seen, "libra_node_worker_restarts_total", worker="w") == 2
    agent.slots["nodes/n0/accelerators/0"].lock.acquire(7)
    agent.measure()
    assert value(now(exposition), "libra_node_accelerator_held_generation", accelerator="n0/0") == 7
    agent.slots["nodes/n0/accelerators/0"].lock.release()
    await agent.session.channel.close()


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def services(folder, listen):
    """Each service's run, on the same way that its command takes."""
    common = {"scheduler": "127.0.0.1:1", "accelerators": ["nodes/n0/accelerators/0"], "blobs": str(folder / "blobs")}
    return {
        "toolenv": lambda: toolenv.run(ToolEnvConfig(environment="calculator", metrics_listen=listen)),
        "node": lambda: node.run(
            NodeConfig.model_validate(
                {
                    "scheduler": "127.0.0.1:1", "node": "n0", "locks": str(folder / "locks"),
                    "accelerators": [{"index": 0, "pool": "HYBRID", "memory_mib": 1}], "metrics_listen": listen,
                }
            )
        ),
        "rollout": lambda: rollout.run(
            RolloutConfig(worker="w", locks=str(folder / "locks"), drain_s=0.1, metrics_listen=listen, **common)
        ),
        "trainer": lambda: trainer.run(
            Config.model_validate(
                {
                    "worker": "w", "lock_dir": str(folder / "locks"), "collective": {"lighthouse": "127.0.0.1:1"},
                    "metrics_listen": listen, "engine": "fake", **common,
                }
            )
        ),
    }  # fmt: skip


@pytest.mark.parametrize("service", ["toolenv", "node", "rollout", "trainer"])
async def test_each_service_serves_from_its_start_to_its_end(service, tmp_path, monkeypatch):
    monkeypatch.setattr(rollout.sys, "setswitchinterval", lambda _: None)
    monkeypatch.setattr(rollout, "build_engine", lambda _: Engine(FakeCore(lambda ids: ids[-1])))
    listen = free_port()
    running = asyncio.create_task(services(tmp_path, listen)[service]())
    async with asyncio.timeout(20):
        while True:
            assert not running.done(), await running
            try:
                text = await scrape(listen)
                break
            except urllib.error.URLError:
                await asyncio.sleep(0.02)
        assert next(labels for name, labels in samples(text) if name == "libra_build_info")[0] == ("service", service)
        assert f"libra_{service}_" in text
        os.kill(os.getpid(), signal.SIGTERM)
        assert await running == 0
    with pytest.raises(urllib.error.URLError, match="refused"):
        await scrape(listen)


FILES = {
    "scheduler": "{{listen: '127.0.0.1:0', database: 'sqlite:///{folder}/l.db', blobs: {folder}, metrics_listen: '{at}'}}",
    "toolenv": "{{environment: calculator, metrics_listen: '{at}'}}",
    "node": "{{scheduler: 'h:1', node: n, locks: {folder}, accelerators: [{{index: 0, pool: HYBRID, memory_mib: 1}}], "
    "metrics_listen: '{at}'}}",
}


@pytest.mark.parametrize("service", FILES)
async def test_a_taken_port_is_a_wrong_configuration(service, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as holder:
        at = f"127.0.0.1:{holder.getsockname()[1]}"
        file = tmp_path / "config.yaml"
        file.write_text(FILES[service].format(folder=tmp_path, at=at))
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", f"services.{service}", "--config", str(file), stderr=asyncio.subprocess.PIPE
        )
        _, said = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 2
    assert f"metrics_listen: cannot listen on {at}" in said.decode()
    assert "Traceback" not in said.decode()
