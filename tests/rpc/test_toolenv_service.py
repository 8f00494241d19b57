"""ToolEnvService over gRPC: the contract, on a server in this process and on servers as processes of their own."""

import asyncio
import itertools
import signal
import subprocess
import sys
import threading
import time
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from services.common import wire
from services.common.clock import ManualClock
from services.common.rpc.channel import connect
from services.common.rpc.server import serve
from services.common.rpc.status import from_rpc_error
from services.toolenv import conformance
from services.toolenv.api import SERVICE_NAME, ToolEnvService
from services.toolenv.config import ToolEnvConfig
from services.toolenv.conformance import Probe
from services.toolenv.envs.base import (
    CallResult,
    InfraError,
    Kind,
    Outcome,
    ScoreResult,
    TaskError,
    TimeoutMeaning,
    ToolSpec,
)
from services.toolenv.envs.calculator import Calculator
from services.toolenv.sessions import Sessions

ROOT = Path(__file__).parents[2]
TASK = '{"question": "3+14-2=?", "answer": "15", "max_ops": 1}'
PROBE = Probe(TASK, "calculate", '{"expression": "3+14"}', "15")
TOOL = ToolSpec("do", "does", {"type": "object"}, Kind.EXTERNAL, 5.0, TimeoutMeaning.EFFECT_UNKNOWN)


class Scripted:
    """An environment that does what the test says: `do` takes its place in each call."""

    name, version, tools = "scripted", "1", (TOOL,)
    instructions, observation = "", "go"

    def __init__(self):
        self.ran, self.closed, self.opened = [], 0, 0
        self.gate = asyncio.Event()
        self.result = CallResult(Outcome.OK, "done")
        self.reward = ScoreResult(Outcome.OK, 1.0)
        self.opening = None

    async def open(self, task, seed):
        self.opened += 1
        if self.opening is not None:
            await self.opening()
        return self

    async def call(self, call_id, tool, arguments, timeout_s):
        self.ran.append(call_id)
        await self.gate.wait()
        if isinstance(self.result, Exception):
            raise self.result
        return self.result

    async def score(self, final_answer, timeout_s):
        self.ran.append("score")
        if isinstance(self.reward, Exception):
            raise self.reward
        return self.reward

    async def close(self):
        self.closed += 1


@asynccontextmanager
async def serving(environment, clock=None, **settings):
    """(stub, service) of an environment on a server in this process."""
    config = ToolEnvConfig(environment="calculator", **settings)
    clock = clock or ManualClock()
    numbers = itertools.count()
    table = Sessions(
        config.max_sessions,
        config.max_session_life_s,
        config.default_ttl_s,
        now=clock.monotonic,
        new_name=lambda: f"sessions/{next(numbers)}",
    )
    service = ToolEnvService(environment, config, table, clock)
    server = await serve(
        [(wire.add_ToolEnvServiceServicer_to_server, service)], "127.0.0.1:0", service_names=[SERVICE_NAME]
    )
    channel = connect(server.address)
    try:
        yield wire.ToolEnvServiceStub(channel), service, server.address
    finally:
        await channel.close()
        await service.shut_down()
        await server.stop(0)


def opening(request_id="r1", task=TASK, epoch=1, **fields):
    return wire.OpenSessionRequest(request_id=request_id, task_json=task, epoch=epoch, **fields)


async def opened(stub, request_id="r1", **fields):
    return (await stub.OpenSession(opening(request_id, **fields), timeout=20)).session


async def call(stub, session, call_id="1-0", *, tool="calculate", arguments="{}", epoch=1, timeout=20, limit=None):
    request = wire.CallToolRequest(
        session=session, epoch=epoch, call_id=call_id, tool=tool, arguments_json=arguments,
        timeout=None if limit is None else wire.duration(limit),
    )  # fmt: skip
    return (await stub.CallTool(request, timeout=timeout)).call


async def refused(awaitable):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await awaitable
    error = from_rpc_error(caught.value)
    return error.reason, error.status


async def test_the_calculator_conforms():
    async with serving(Calculator()) as (_, _, address):
        findings = await asyncio.to_thread(conformance.check, address, PROBE)
    assert [finding for finding in findings if finding.wrong] == []
    assert len(findings) >= 11


async def test_an_episode():
    async with serving(Calculator()) as (stub, _, _):
        described = await stub.Describe(wire.DescribeRequest(), timeout=20)
        assert described.environment == "calculator"
        assert described.tools[0].kind == wire.TOOL_KIND_PURE
        answer = await stub.OpenSession(opening(ttl=wire.duration(30)), timeout=20)
        assert (answer.observation, answer.instructions) == ("3+14-2=?", "")
        assert wire.seconds(answer.ttl) == 30
        done = await call(stub, answer.session, arguments='{"expression": "3+14"}')
        assert (done.outcome, done.output, done.payload_class) == (wire.TOOL_OUTCOME_OK, "17", "number")
        done = await call(stub, answer.session, "1-1", arguments='{"expression": "3+14-2"}')
        assert (done.outcome, done.output) == (wire.TOOL_OUTCOME_TOOL_ERROR, "error: at most 1 operator")
        score = await stub.Score(wire.ScoreRequest(session=answer.session, epoch=1, final_answer="15"), timeout=20)
        assert (score.outcome, score.reward) == (wire.TOOL_OUTCOME_OK, 1.0)


@pytest.mark.parametrize(
    ("tool", "arguments", "payload_class"),
    [
        ("no_such_tool", "{}", "unknown_tool"), ("", "{}", "unknown_tool"),
        ("calculate", "{oops", "bad_arguments"), ("calculate", "", "bad_arguments"),
        ("calculate", "[]", "bad_arguments"), ("calculate", "3", "bad_arguments"),
        ("calculate", "[" * 200_000, "bad_arguments"), ("calculate", '"' + "x" * 300_000 + '"', "bad_arguments"),
        ("calculate", '{"expression": "' + "1+" * 100_000 + '1"}', "bad_expression"),
        ("calculate", '{"expression": "\\ud800"}', "bad_expression"),
        ("calculate", '{"expression": "2**99999999"}', "bad_expression"),
    ],
)  # fmt: skip
async def test_what_the_model_writes_wrong_is_its_error(tool, arguments, payload_class):
    async with serving(Calculator()) as (stub, _, _):
        done = await call(stub, await opened(stub), tool=tool, arguments=arguments)
        assert (done.outcome, done.payload_class) == (wire.TOOL_OUTCOME_TOOL_ERROR, payload_class)
        assert done.output.startswith("error: ")


@pytest.mark.parametrize(
    ("request_", "named"),
    [
        (opening(task="{oops"), "task_json"), (opening(task="[]"), "task_json"), (opening(task=""), "task_json"),
        (opening(task='{"question": "q"}'), "answer"), (opening(task="[" * 100_000), "task_json"),
        (opening(task='"' + "x" * 300_000 + '"'), "task_json"), (opening(request_id=""), "request_id"),
        (opening(request_id="x" * 200), "request_id"), (opening(epoch=-1), "epoch"),
    ],
)  # fmt: skip
async def test_what_the_caller_sends_wrong_is_refused(request_, named):
    async with serving(Calculator()) as (stub, service, _):
        with pytest.raises(grpc.aio.AioRpcError, match=named) as caught:
            await stub.OpenSession(request_, timeout=20)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert len(service._table) == 0
        assert await opened(stub), "the same request id, now with a task that fits"


async def test_calls_without_a_deadline_are_refused():
    async with serving(Calculator()) as (stub, _, _):
        assert (await refused(stub.OpenSession(opening())))[0] == "DEADLINE_REQUIRED"


async def test_a_request_id_with_another_task_is_refused():
    async with serving(Calculator()) as (stub, _, _):
        await opened(stub)
        again = stub.OpenSession(opening(task='{"question": "1+1=?", "answer": "2"}'), timeout=20)
        assert await refused(again) == ("REQUEST_ID_REUSED", grpc.StatusCode.INVALID_ARGUMENT)
        again = stub.OpenSession(opening(seed=5), timeout=20)
        assert (await refused(again))[0] == "REQUEST_ID_REUSED"


async def test_two_opens_of_one_request_at_once_start_one_session():
    environment = Scripted()
    may_start = asyncio.Event()
    environment.opening = may_start.wait
    async with serving(environment) as (stub, _, _):
        both = [asyncio.create_task(opened(stub)) for _ in range(2)]
        async with asyncio.timeout(20):
            while environment.opened == 0:
                await asyncio.sleep(0.01)
        may_start.set()
        assert len(set(await asyncio.gather(*both))) == 1
        assert environment.opened == 1


async def test_a_session_that_does_not_start_can_be_tried_again():
    environment = Scripted()

    async def broken():
        raise InfraError("no disk")

    environment.opening = broken
    async with serving(environment) as (stub, _, _):
        assert (await refused(stub.OpenSession(opening(), timeout=20)))[0] == "INTERNAL"
        environment.opening = None
        assert await opened(stub)


async def test_starting_sessions_are_bounded():
    environment = Scripted()
    may_start = asyncio.Event()
    environment.opening = may_start.wait
    async with serving(environment, max_starting=1) as (stub, _, _):
        first = asyncio.create_task(opened(stub, "r1"))
        async with asyncio.timeout(20):
            while environment.opened == 0:
                await asyncio.sleep(0.01)
        reason = await refused(stub.OpenSession(opening("r2"), timeout=20))
        assert reason == ("CAPACITY", grpc.StatusCode.RESOURCE_EXHAUSTED)
        may_start.set()
        await first
        assert await opened(stub, "r2"), "a refused request leaves nothing behind"


async def test_case_30_sessions_beyond_capacity_are_refused_with_a_hint():
    async with serving(Calculator(), max_sessions=2) as (stub, _, _):
        first = await opened(stub, "r1")
        await opened(stub, "r2")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await opened(stub, "r3")
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert float(from_rpc_error(caught.value).metadata["retry_after_s"]) > 0
        await stub.CloseSession(wire.CloseSessionRequest(session=first, epoch=1), timeout=20)
        assert await opened(stub, "r3")


async def test_a_call_outlives_its_caller_and_runs_once():
    environment = Scripted()
    async with serving(environment) as (stub, _, _):
        session = await opened(stub)
        running = await call(stub, session, tool="do", timeout=0.6)
        assert running.running
        assert wire.seconds(running.retry_after) > 0
        assert running.outcome == wire.TOOL_OUTCOME_UNSPECIFIED
        asked = wire.GetCallRequest(session=session, call_id="1-0")
        assert (await stub.GetCall(asked, timeout=20)).call.running
        # another worker takes the session over while the call runs
        attached = await stub.AttachSession(wire.AttachSessionRequest(session=session, epoch=2), timeout=20)
        assert list(attached.call_ids) == ["1-0"]
        waiting = asyncio.create_task(call(stub, session, tool="do", epoch=2))
        environment.gate.set()
        assert (await waiting).output == "done"
        assert (await stub.GetCall(asked, timeout=20)).call.output == "done"
        assert environment.ran == ["1-0"]
        assert await refused(call(stub, session, "1-1", tool="do", epoch=1)) == (
            "STALE_FENCE",
            grpc.StatusCode.FAILED_PRECONDITION,
        )


async def test_a_caller_that_goes_away_does_not_end_the_call():
    environment = Scripted()
    async with serving(environment) as (stub, _, _):
        session = await opened(stub)
        gone = asyncio.create_task(call(stub, session, tool="do"))
        async with asyncio.timeout(20):
            while not environment.ran:
                await asyncio.sleep(0.01)
        gone.cancel()
        environment.gate.set()
        assert (await call(stub, session, tool="do")).output == "done"
        assert environment.ran == ["1-0"]


@pytest.mark.parametrize(
    "result", [InfraError("no disk"), ValueError("a defect"), CallResult(Outcome.INFRA_ERROR, "x")]
)
async def test_case_34_a_broken_environment_is_infra_error(result):
    environment = Scripted()
    environment.result = environment.reward = result
    if isinstance(result, CallResult):
        environment.reward = ScoreResult(Outcome.INFRA_ERROR)
    environment.gate.set()
    async with serving(environment) as (stub, _, _):
        session = await opened(stub)
        assert (await call(stub, session, tool="do")).outcome == wire.TOOL_OUTCOME_INFRA_ERROR
        score = await stub.Score(wire.ScoreRequest(session=session, epoch=1), timeout=20)
        assert score.outcome == wire.TOOL_OUTCOME_INFRA_ERROR
        assert not score.HasField("reward"), "never a reward of 0 for what broke on our side"


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), None])
async def test_a_reward_that_is_no_number_is_no_reward(reward):
    environment = Scripted()
    environment.reward = ScoreResult(Outcome.OK, reward)
    async with serving(environment) as (stub, _, _):
        score = await stub.Score(wire.ScoreRequest(session=await opened(stub), epoch=1), timeout=20)
        assert score.outcome == wire.TOOL_OUTCOME_INFRA_ERROR
        assert not score.HasField("reward")


async def test_score_is_computed_once():
    environment = Scripted()
    async with serving(environment) as (stub, _, _):
        session = await opened(stub)
        asked = [stub.Score(wire.ScoreRequest(session=session, epoch=1, final_answer=a), timeout=20) for a in "abc"]
        scores = await asyncio.gather(*asked)
        assert [score.reward for score in scores] == [1.0] * 3
        assert environment.ran == ["score"]


async def test_output_is_cut_to_the_contracts_bound():
    environment = Scripted()
    environment.result = CallResult(Outcome.OK, "é" * 300_000, "x" * 100)
    environment.gate.set()
    async with serving(environment) as (stub, _, _):
        done = await call(stub, await opened(stub), tool="do")
        assert done.truncated
        assert 256 * 1024 - 4 < len(done.output.encode()) <= 256 * 1024
        assert len(done.payload_class) == 64


async def test_lone_surrogates_do_not_break_the_answer():
    environment = Scripted()
    environment.result = CallResult(Outcome.OK, "a\ud800b")
    environment.gate.set()
    async with serving(environment) as (stub, _, _):
        assert (await call(stub, await opened(stub), tool="do")).output == "a?b"


async def test_the_shorter_time_limit_holds():
    task = '{"question": "1+1=?", "answer": "2", "latency": {"p50_ms": 1000, "p99_ms": 1000}}'
    slept = []

    async def sleep(seconds):
        slept.append(seconds)

    async with serving(Calculator(timeout_s=3.0, sleep=sleep)) as (stub, _, _):
        session = await opened(stub, task=task)
        one_plus_one = '{"expression": "1+1"}'
        assert (await call(stub, session, "1-0", arguments=one_plus_one, limit=9)).outcome == wire.TOOL_OUTCOME_OK
        late = await call(stub, session, "1-1", arguments=one_plus_one, limit=0.5)
        assert (late.outcome, late.output) == (wire.TOOL_OUTCOME_TIMEOUT, "timeout")
        assert slept == [1.0, 0.5]


async def test_expired_sessions_are_refused_and_freed():
    environment, clock = Scripted(), ManualClock()
    async with serving(environment, clock) as (stub, service, _):
        session = await opened(stub, ttl=wire.duration(10))
        await call(stub, session, tool="do", timeout=0.6)
        renewed = wire.RenewSessionRequest(session=session, epoch=1, ttl=wire.duration(20))
        assert wire.seconds((await stub.RenewSession(renewed, timeout=20)).ttl) == 20
        clock.advance(19)
        assert await service.expire_once() == 0
        clock.advance(1)
        expired = ("SESSION_EXPIRED", grpc.StatusCode.FAILED_PRECONDITION)
        assert await refused(call(stub, session, "1-1", tool="do")) == expired
        assert await service.expire_once() == 1
        assert environment.closed == 1
        assert await refused(stub.RenewSession(renewed, timeout=20)) == expired
        assert await refused(stub.OpenSession(opening(ttl=wire.duration(10)), timeout=20)) == expired
        await stub.CloseSession(wire.CloseSessionRequest(session=session, epoch=1), timeout=20)


async def test_closing_ends_running_calls():
    environment = Scripted()
    async with serving(environment) as (stub, service, _):
        session = await opened(stub)
        waiting = asyncio.create_task(call(stub, session, tool="do"))
        async with asyncio.timeout(20):
            while not environment.ran:
                await asyncio.sleep(0.01)
        await stub.CloseSession(wire.CloseSessionRequest(session=session, epoch=1), timeout=20)
        assert (await waiting).outcome == wire.TOOL_OUTCOME_INFRA_ERROR, "voids an attempt, rewards nobody"
        assert environment.closed == 1
        assert service._live == {}


async def test_calls_of_one_session_run_in_order():
    environment = Scripted()
    async with serving(environment) as (stub, _, _):
        session = await opened(stub)
        first = asyncio.create_task(call(stub, session, "1-0", tool="do"))
        async with asyncio.timeout(20):
            while not environment.ran:
                await asyncio.sleep(0.01)
        second = asyncio.create_task(call(stub, session, "1-1", tool="do"))
        assert (await call(stub, session, "1-1", tool="do", timeout=0.6)).running
        assert environment.ran == ["1-0"]
        environment.gate.set()
        await asyncio.gather(first, second)
        assert environment.ran == ["1-0", "1-1"]


async def test_a_task_error_is_told_with_its_words():
    environment = Scripted()

    async def wrong():
        raise TaskError("shape: expected round, found square")

    environment.opening = wrong
    async with serving(environment) as (stub, _, _):
        with pytest.raises(grpc.aio.AioRpcError, match="shape: expected round, found square"):
            await opened(stub)


def started(*command):
    return subprocess.Popen([sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE, text=True)


@asynccontextmanager
async def process(*command, ready):
    """A server as a process; `ready(child)` gives its address."""
    child = started(*command)
    alarm = threading.Timer(60, child.kill)
    alarm.start()
    try:
        yield child, await asyncio.to_thread(ready, child)
    finally:
        alarm.cancel()
        child.kill()
        child.wait(timeout=20)
        child.stdout.close()


async def test_an_environment_of_ones_own_conforms():
    def printed(child):
        return child.stdout.readline().strip()

    async with process("docs/examples/own_environment.py", "--listen", "127.0.0.1:0", ready=printed) as (_, address):
        findings = await asyncio.to_thread(conformance.check, address, Probe(TASK, "", PROBE.arguments_json, "15"))
        assert [finding for finding in findings if finding.wrong] == []
        async with connect(address) as channel:
            stub = wire.ToolEnvServiceStub(channel)
            session = await opened(stub)
            assert (await call(stub, session, arguments='{"expression": "3+14"}')).output == "17"


async def test_the_service_stops_at_sigterm(tmp_path):
    ready, file = tmp_path / "ready", tmp_path / "toolenv.yaml"
    file.write_text(f"environment: calculator\nlisten: 127.0.0.1:0\nready_file: {ready}\n")

    def written(child):
        while not ready.exists():
            assert child.poll() is None
            time.sleep(0.05)
        return ready.read_text()

    async with process("-m", "services.toolenv", "--config", str(file), ready=written) as (child, address):
        task = tmp_path / "task.json"
        task.write_text(TASK)
        kit = [sys.executable, "-m", "services.toolenv.conformance", address, "--task", str(task)]
        said = await asyncio.to_thread(
            subprocess.run, kit, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
        )
        assert said.returncode == 0, said.stdout + said.stderr
        assert said.stdout.count("ok ") == 11
        child.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(child.wait, 20) == 0


class Careless(ToolEnvService):
    """Servers that break one rule each, to see the kit find it."""

    rule = ""

    async def CallTool(self, request, context):
        if self.rule == "runs twice":
            output = str(time.monotonic_ns())
            call = wire.ToolCall(call_id=request.call_id, outcome=wire.TOOL_OUTCOME_OK, output=output)
            return wire.CallToolResponse(call=call)
        return await super().CallTool(request, context)

    async def AttachSession(self, request, context):
        if self.rule == "forgets epochs":
            return wire.AttachSessionResponse(epoch=request.epoch)
        return await super().AttachSession(request, context)

    async def OpenSession(self, request, context):
        if self.rule == "opens twice":
            request.request_id += str(time.monotonic_ns())
        return await super().OpenSession(request, context)

    async def Score(self, request, context):
        if self.rule == "scores again":
            return wire.ScoreResponse(outcome=wire.TOOL_OUTCOME_OK, reward=float(request.final_answer == "15"))
        if self.rule == "scores what broke":
            return wire.ScoreResponse(outcome=wire.TOOL_OUTCOME_INFRA_ERROR, reward=0.0)
        return await super().Score(request, context)

    async def CloseSession(self, request, context):
        if self.rule == "never closes":
            return wire.CloseSessionResponse()
        return await super().CloseSession(request, context)


@pytest.mark.parametrize(
    ("rule", "check"),
    [
        ("", None),
        ("runs twice", "a call runs once per call_id"),
        ("forgets epochs", "a lower epoch is refused"),
        ("opens twice", "open is idempotent by request_id"),
        ("scores again", "score is idempotent"),
        ("scores what broke", "score is idempotent"),
        ("never closes", "close"),
    ],
)
async def test_the_kit_finds_what_differs(rule, check, monkeypatch):
    monkeypatch.setattr(Careless, "rule", rule)
    monkeypatch.setitem(globals(), "ToolEnvService", Careless)
    async with serving(Calculator()) as (_, _, address):
        findings = await asyncio.to_thread(conformance.check, address, PROBE)
    wrong = {finding.check for finding in findings if finding.wrong}
    assert (check in wrong) if check else not wrong
