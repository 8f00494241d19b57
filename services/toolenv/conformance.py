"""The conformance kit of ToolEnvService: speaks the contract with a running server and says where it differs.

    python -m services.toolenv.conformance HOST:PORT --task FILE [--tool NAME --arguments JSON] [--answer TEXT]

FILE holds one task of the environment, a JSON object (of a JSONL file the first line is taken). Without --tool the
first one offered is called with empty arguments, which the server may answer with TOOL_ERROR: how results are stored
is checked all the same. Exit code 0: conforms; 1: something differs; 2: the server cannot be asked.
"""

import argparse
import json
import math
import re
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from services.common import wire
from services.common.rpc.channel import connect_sync

CALL_SECONDS = 60.0
TTL_SECONDS = 60.0
MAX_TEXT_BYTES = 256 << 10
MAX_SCHEMA_BYTES = 32 << 10
MAX_TOOLS = 128
TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")

_GONE = (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION)


@dataclass(frozen=True, slots=True)
class Probe:
    """What the kit says to the server."""

    task_json: str
    tool: str = ""
    arguments_json: str = "{}"
    answer: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """One check: its name, and what was wrong; empty if nothing."""

    check: str
    wrong: str


class Difference(Exception):
    """The server does something else than the contract says."""


def check(address: str, probe: Probe) -> list[Finding]:
    """Runs every check against host:port, each in sessions of its own. RpcError if the server cannot be reached."""
    with connect_sync(address) as channel:
        stub = wire.ToolEnvServiceStub(channel)
        described = stub.Describe(wire.DescribeRequest(), timeout=CALL_SECONDS, wait_for_ready=True)
        if not probe.tool and described.tools:
            probe = Probe(probe.task_json, described.tools[0].name, probe.arguments_json, probe.answer)
        kit = Kit(stub, probe, described)
        return [Finding(name, _run(test)) for name, test in kit.checks()]


def _run(test: Callable[[], None]) -> str:
    try:
        test()
    except Difference as difference:
        return str(difference)
    except grpc.RpcError as error:
        call: Any = error
        return f"unexpected {call.code().name}: {call.details()}"
    return ""


class Kit:
    """The checks, one a method, and what they share."""

    def __init__(self, stub: Any, probe: Probe, described: wire.DescribeResponse) -> None:
        self._stub = stub
        self._probe = probe
        self._described = described

    def checks(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """Every check with its name."""
        yield "describe", self.describe
        yield "open is idempotent by request_id", self.open_idempotent
        yield "a lower epoch is refused", self.epoch_fencing
        yield "a call runs once per call_id", self.call_once
        yield "a known call_id with other arguments is refused", self.call_conflict
        yield "what the model does wrong is TOOL_ERROR", self.model_errors
        yield "score is idempotent", self.score_once
        yield "renew", self.renew
        yield "close", self.close
        yield "unknown sessions", self.unknown_session
        yield "snapshots as described", self.snapshots

    def describe(self) -> None:
        """Names, schemas and bounds; the same answer twice."""
        described = self._described
        _expect(bool(described.environment), "environment is empty")
        _expect(wire.seconds(described.max_session_life) > 0, "max_session_life is not set")
        _expect(len(described.tools) <= MAX_TOOLS, f"{len(described.tools)} tools; at most {MAX_TOOLS}")
        names = [tool.name for tool in described.tools]
        _expect(len(set(names)) == len(names), f"tool names repeat: {names}")
        for tool in described.tools:
            _expect(TOOL_NAME.fullmatch(tool.name) is not None, f"tool name {tool.name!r}")
            _expect(len(tool.parameters_json_schema.encode()) <= MAX_SCHEMA_BYTES, f"schema of {tool.name} is too big")
            try:
                schema = json.loads(tool.parameters_json_schema)
            except ValueError:
                raise Difference(f"schema of {tool.name} is not JSON") from None
            _expect(isinstance(schema, dict) and schema.get("type") == "object", f"{tool.name}: no object schema")
        again = self._call("Describe", wire.DescribeRequest())
        _expect(again == described, "Describe changed between two calls")

    def open_idempotent(self) -> None:
        """Same id, same session; other id, another one."""
        request = self._open_request()
        first, second = self._call("OpenSession", request), self._call("OpenSession", request)
        _expect(first.session == second.session, f"one request_id gave {first.session!r} and {second.session!r}")
        _expect(first.observation == second.observation, "one request_id gave two observations")
        _expect(0 < len(first.session.encode()) <= 128, "session name must have 1 to 128 bytes")
        life = wire.seconds(self._described.max_session_life)
        _expect(0 < wire.seconds(first.ttl) <= life, f"ttl must be over 0 and at most {life:g} s")
        other = self._call("OpenSession", self._open_request())
        _expect(other.session != first.session, "two request_ids gave the same session")
        self._close(first.session, 1)
        self._close(other.session, 1)

    def epoch_fencing(self) -> None:
        """After an attach with 5, everything with less is refused; so are calls with more."""
        session = self._open()
        attached = self._attach(session, 5)
        _expect(attached.epoch == 5, f"attach with epoch 5 answered {attached.epoch}")
        self._refused("attach below the epoch", lambda: self._attach(session, 4))
        self._refused("call below the epoch", lambda: self._tool(session, 4, "4-0"))
        self._refused("call above the epoch", lambda: self._tool(session, 6, "6-0"))
        self._refused("score below the epoch", lambda: self._score(session, 4, ""))
        self._refused("renew below the epoch", lambda: self._renew(session, 4))
        self._refused("close below the epoch", lambda: self._close(session, 4))
        self._refused("GetCall of a refused call", lambda: self._get(session, "4-0"), grpc.StatusCode.NOT_FOUND)
        _expect(self._attach(session, 5).epoch == 5, "attaching again with the same epoch must be accepted")
        self._tool(session, 5, "5-0")
        self._close(session, 5)

    def call_once(self) -> None:
        """The same id gives the stored result, through CallTool and GetCall; attach lists ids in their order."""
        session = self._open()
        first = self._tool(session, 1, "1-0")
        _expect(first.call_id == "1-0", f"call_id came back as {first.call_id!r}")
        _expect(first.outcome != wire.TOOL_OUTCOME_UNSPECIFIED, "a finished call has no outcome")
        _expect(len(first.output.encode()) <= MAX_TEXT_BYTES, "output is longer than 256 KiB")
        _expect(self._tool(session, 1, "1-0") == first, "the same call_id gave another result")
        _expect(self._get(session, "1-0") == first, "GetCall gave another result than CallTool")
        self._refused("GetCall of an unknown id", lambda: self._get(session, "1-9"), grpc.StatusCode.NOT_FOUND)
        self._tool(session, 1, "1-1")
        known = list(self._attach(session, 2).call_ids)
        _expect(known == ["1-0", "1-1"], f"attach listed {known}, expected ['1-0', '1-1']")
        _expect(self._tool(session, 2, "1-0") == first, "the result was lost at an attach")
        self._close(session, 2)

    def call_conflict(self) -> None:
        """INVALID_ARGUMENT, and the stored result stays."""
        session = self._open()
        first = self._tool(session, 1, "1-0")
        other = json.dumps({"other": str(uuid.uuid4())})
        invalid = grpc.StatusCode.INVALID_ARGUMENT
        self._refused("other arguments", lambda: self._tool(session, 1, "1-0", arguments=other), invalid)
        self._refused("another tool", lambda: self._tool(session, 1, "1-0", tool="no_such_tool"), invalid)
        _expect(self._tool(session, 1, "1-0") == first, "a refused call changed the stored result")
        self._close(session, 1)

    def model_errors(self) -> None:
        """Unknown tool, invalid JSON, JSON that is no object: the call succeeds and its outcome says so."""
        session = self._open()
        cases = [
            ("an unknown tool", {"tool": "no_such_tool"}),
            ("invalid JSON", {"arguments": "{oops"}),
            ("a JSON list", {"arguments": "[1]"}),
            ("empty arguments", {"arguments": ""}),
        ]
        for number, (what, changes) in enumerate(cases):
            outcome = self._tool(session, 1, f"1-{number}", **changes).outcome
            name = wire.ToolOutcome.Name(outcome)
            _expect(outcome == wire.TOOL_OUTCOME_TOOL_ERROR, f"{what} gave {name}, expected TOOL_OUTCOME_TOOL_ERROR")
        self._close(session, 1)

    def score_once(self) -> None:
        """The first answer stands; a reward is there with OK and only then."""
        session = self._open()
        first = self._score(session, 1, self._probe.answer)
        if first.outcome == wire.TOOL_OUTCOME_OK:
            _expect(first.HasField("reward"), "OK without a reward; set it even if it is 0")
            _expect(math.isfinite(first.reward), f"the reward is {first.reward}")
        else:
            _expect(not first.HasField("reward"), "a reward without OK")
        _expect(first.outcome != wire.TOOL_OUTCOME_UNSPECIFIED, "the score has no outcome")
        _expect(self._score(session, 1, "something else") == first, "a second Score gave another answer")
        self._attach(session, 2)
        _expect(self._score(session, 2, self._probe.answer) == first, "the score was lost at an attach")
        self._close(session, 2)

    def renew(self) -> None:
        """A renewal gives a time to live within the bounds."""
        session = self._open()
        ttl, life = wire.seconds(self._renew(session, 1).ttl), wire.seconds(self._described.max_session_life)
        _expect(0 < ttl <= life, f"ttl {ttl:g} s; expected over 0 and at most {life:g}")
        self._close(session, 1)

    def close(self) -> None:
        """Twice is fine; afterwards nothing works."""
        session = self._open()
        self._close(session, 1)
        self._close(session, 1)
        self._refused("a call after close", lambda: self._tool(session, 1, "1-0"), *_GONE)
        self._refused("attach after close", lambda: self._attach(session, 2), *_GONE)

    def unknown_session(self) -> None:
        """NOT_FOUND, except for CloseSession."""
        name = f"sessions/{uuid.uuid4()}"
        self._refused("attach", lambda: self._attach(name, 1), grpc.StatusCode.NOT_FOUND)
        self._refused("call", lambda: self._tool(name, 1, "1-0"), grpc.StatusCode.NOT_FOUND)
        self._refused("GetCall", lambda: self._get(name, "1-0"), grpc.StatusCode.NOT_FOUND)
        self._refused("score", lambda: self._score(name, 1, ""), grpc.StatusCode.NOT_FOUND)
        self._close(name, 1)

    def snapshots(self) -> None:
        """If Describe says no, UNIMPLEMENTED. If it says yes, they are not checked yet."""
        if self._described.snapshots:
            return
        request = wire.SnapshotRequest(request_id=str(uuid.uuid4()), session="none", epoch=1)
        self._refused("Snapshot", lambda: self._call("Snapshot", request), grpc.StatusCode.UNIMPLEMENTED)

    def _call(self, method: str, request: wire.Message) -> Any:
        return getattr(self._stub, method)(request, timeout=CALL_SECONDS)

    def _open_request(self) -> wire.OpenSessionRequest:
        return wire.OpenSessionRequest(
            request_id=str(uuid.uuid4()),
            task_json=self._probe.task_json,
            trajectory="runs/conformance/trajectories/0",
            epoch=1,
            ttl=wire.duration(TTL_SECONDS),
            seed=1,
        )

    def _open(self) -> str:
        session: str = self._call("OpenSession", self._open_request()).session
        return session

    def _attach(self, session: str, epoch: int) -> wire.AttachSessionResponse:
        request = wire.AttachSessionRequest(session=session, epoch=epoch, attempt=1)
        answer: wire.AttachSessionResponse = self._call("AttachSession", request)
        return answer

    def _tool(
        self, session: str, epoch: int, call_id: str, *, tool: str | None = None, arguments: str | None = None
    ) -> wire.ToolCall:
        request = wire.CallToolRequest(
            session=session,
            epoch=epoch,
            call_id=call_id,
            tool=self._probe.tool if tool is None else tool,
            arguments_json=self._probe.arguments_json if arguments is None else arguments,
            timeout=wire.duration(CALL_SECONDS / 2),
        )
        call: wire.ToolCall = self._call("CallTool", request).call
        _expect(not call.running, "the call did not end within the kit's patience")
        return call

    def _get(self, session: str, call_id: str) -> wire.ToolCall:
        call: wire.ToolCall = self._call("GetCall", wire.GetCallRequest(session=session, call_id=call_id)).call
        return call

    def _score(self, session: str, epoch: int, answer: str) -> wire.ScoreResponse:
        request = wire.ScoreRequest(
            session=session, epoch=epoch, final_answer=answer, timeout=wire.duration(CALL_SECONDS / 2)
        )
        score: wire.ScoreResponse = self._call("Score", request)
        return score

    def _renew(self, session: str, epoch: int) -> wire.RenewSessionResponse:
        request = wire.RenewSessionRequest(session=session, epoch=epoch, ttl=wire.duration(TTL_SECONDS))
        answer: wire.RenewSessionResponse = self._call("RenewSession", request)
        return answer

    def _close(self, session: str, epoch: int) -> None:
        self._call("CloseSession", wire.CloseSessionRequest(session=session, epoch=epoch))

    def _refused(self, what: str, call: Callable[[], object], *codes: grpc.StatusCode) -> None:
        """The call must fail with one of the codes; FAILED_PRECONDITION if none is given."""
        codes = codes or (grpc.StatusCode.FAILED_PRECONDITION,)
        names = " or ".join(code.name for code in codes)
        try:
            call()
        except grpc.RpcError as error:
            refused: Any = error
            _expect(refused.code() in codes, f"{what} was refused with {refused.code().name}, expected {names}")
            return
        raise Difference(f"{what} was accepted, expected {names}")


def _expect(condition: bool, otherwise: str) -> None:
    if not condition:
        raise Difference(otherwise)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m services.toolenv.conformance", description=__doc__)
    parser.add_argument("address", help="host:port of the environment")
    parser.add_argument("--task", type=Path, required=True, help="file with one task, a JSON object")
    parser.add_argument("--tool", default="", help="tool to call; default: the first one offered")
    parser.add_argument("--arguments", default="{}", help="its arguments, a JSON object")
    parser.add_argument("--answer", default="", help="final answer to score")
    given = parser.parse_args()
    try:
        first = given.task.read_text().strip().splitlines()
        text = given.task.read_text() if given.task.suffix != ".jsonl" else first[0]
        json.loads(text)
    except (OSError, ValueError, IndexError) as error:
        sys.stderr.write(f"{given.task}: expected a JSON object: {error}\n")
        return 2
    try:
        findings = check(given.address, Probe(text, given.tool, given.arguments, given.answer))
    except grpc.RpcError as error:
        failed: Any = error
        sys.stderr.write(f"{given.address}: Describe failed: {failed.code().name}: {failed.details()}\n")
        return 2
    for finding in findings:
        sys.stdout.write(f"{'DIFFERS' if finding.wrong else 'ok     '} {finding.check}")
        sys.stdout.write(f": {finding.wrong}\n" if finding.wrong else "\n")
    return 1 if any(finding.wrong for finding in findings) else 0


if __name__ == "__main__":
    sys.exit(main())
