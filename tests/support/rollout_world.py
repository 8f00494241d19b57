"""A small world around rollout episodes: a toy tool environment in this process, a scheduler that only remembers."""

import asyncio
import json
from pathlib import Path

import grpc
import numpy as np

from services.common import segment, wire
from services.common.blobs import BlobStore
from services.common.history import History
from services.rollout.dialect import LibraTags
from services.rollout.engine.base import Finish, Version, Weights
from services.rollout.engine.thread import Engine
from services.rollout.environment import Environments
from services.rollout.episode import Episode, Place

RUN = "runs/r"
TRAJECTORY = f"{RUN}/trajectories/0-0"


class ToyEnv(wire.ToolEnvServiceServicer):
    """Answers every call with its length; remembers calls, epochs and closes. `gate` holds calls up."""

    def __init__(self) -> None:
        self.sessions: dict[str, dict] = {}
        self.calls: dict[tuple[str, str], wire.ToolCall] = {}
        self.executed: list[str] = []
        self.answers: list[str] = []
        self.closed: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.in_call = asyncio.Event()
        self.observation = "3+4=?"
        self.outcome = wire.TOOL_OUTCOME_OK
        self.output = ""
        self.unavailable = 0

    async def Describe(self, request, context):
        tool = wire.Tool(name="calculate", kind=wire.TOOL_KIND_PURE)
        return wire.DescribeResponse(environment="toy", version="1", tools=[tool])

    async def OpenSession(self, request, context):
        name = f"s-{request.request_id}"
        self.sessions.setdefault(name, {"epoch": request.epoch, "content": request.SerializeToString()})
        if self.sessions[name]["content"] != request.SerializeToString():
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "same id, other content")
        return wire.OpenSessionResponse(session=name, ttl=wire.duration(60), observation=self.observation)

    async def AttachSession(self, request, context):
        session = self.sessions.get(request.session)
        if session is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such session")
        if request.epoch < session["epoch"]:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "stale epoch")
        session["epoch"] = request.epoch
        return wire.AttachSessionResponse(epoch=request.epoch, ttl=wire.duration(60))

    async def CallTool(self, request, context):
        if self.unavailable:
            self.unavailable -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "away")
        if request.epoch != self.sessions[request.session]["epoch"]:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "stale epoch")
        key = (request.session, request.call_id)
        if key not in self.calls:
            self.executed.append(request.call_id)
            self.calls[key] = wire.ToolCall(
                call_id=request.call_id,
                outcome=self.outcome,
                output=self.output or str(len(json.loads(request.arguments_json)["expression"])),
                latency=wire.duration(0.01),
                payload_class="number",
            )
            self.in_call.set()
            await self.gate.wait()
        return wire.CallToolResponse(call=self.calls[key])

    async def GetCall(self, request, context):
        return wire.GetCallResponse(call=self.calls[request.session, request.call_id])

    async def Score(self, request, context):
        self.answers.append(request.final_answer)
        return wire.ScoreResponse(outcome=wire.TOOL_OUTCOME_OK, reward=0.5)

    async def RenewSession(self, request, context):
        return wire.RenewSessionResponse(ttl=wire.duration(60))

    async def CloseSession(self, request, context):
        self.closed.append(request.session)
        return wire.CloseSessionResponse()


class ChattyTags(LibraTags):
    """LibraTags in which some letters end a turn too, so that a random model calls tools often."""

    def __init__(self, codec) -> None:
        super().__init__(codec)
        ends = {codec.encode(c)[0]: Finish.TOOL_CALL for c in "0369cfilorux"}
        self.stop_ids = {**self.stop_ids, **ends}


class World:
    """One trajectory's record at the scheduler, the environment, and the blobs."""

    def __init__(self, folder: Path, *, budget: int = 40, turns: int = 64, temperature: float = 1.0) -> None:
        self.env = ToyEnv()
        self.blobs = BlobStore(str(folder / "blobs"))
        self.environments = Environments()
        self.budget, self.turn_limit = budget, turns
        self.run = wire.Run(name=RUN, seed=7, environment="toy")
        self.run.sampling.temperature = temperature
        self.turns: list[wire.Turn] = []
        self.sequences: dict[int, wire.Sequence] = {}
        self.tool_sessions: list[wire.ToolSession] = []
        self.ends: list[wire.TrajectoryEnd] = []
        self.deltas: list[wire.Delta] = []
        self.refuse: str = ""
        self.epoch = 0
        self.attempt = 1
        self.reported = asyncio.Event()
        self._server: grpc.aio.Server | None = None
        self.address = ""

    async def start(self) -> None:
        self._server = grpc.aio.server()
        wire.add_ToolEnvServiceServicer_to_server(self.env, self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        self.address = f"127.0.0.1:{port}"

    async def stop(self) -> None:
        self.env.gate.set()
        await self.environments.close()
        await self._server.stop(None)

    async def report(self, delta: wire.Delta) -> list[wire.Refusal]:
        kept = wire.Delta()
        kept.CopyFrom(delta)
        self.deltas.append(kept)
        refusals = []
        for progress in kept.progress:
            if self.refuse or progress.lease_epoch != self.epoch:
                code = self.refuse or "STALE_ATTEMPT"
                refusals.append(wire.Refusal(name=progress.trajectory, reason=wire.Reason(code=code)))
                continue
            for turn in progress.turns:
                assert all((t.index, t.part) != (turn.index, turn.part) for t in self.turns), "a part came twice"
                assert turn.generated_tokens or not turn.finish or turn.part, "finished without a token"
                self.turns.append(turn)
            for sequence in progress.sequences:
                known = self.sequences.setdefault(sequence.index, wire.Sequence())
                known.MergeFrom(sequence)
            if progress.tool_sessions:
                self.tool_sessions = list(progress.tool_sessions)
        for end in kept.ends:
            if self.refuse or end.lease_epoch != self.epoch:
                refusals.append(wire.Refusal(name=end.trajectory, reason=wire.Reason(code="STALE_ATTEMPT")))
            else:
                self.ends.append(end)
        self.reported.set()
        return refusals

    @property
    def generated(self) -> int:
        return sum(t.generated_tokens for t in self.turns)

    def lease(self) -> wire.TrajectoryLease:
        self.epoch += 1
        return wire.TrajectoryLease(
            trajectory=TRAJECTORY,
            attempt=self.attempt,
            lease_epoch=self.epoch,
            task=wire.Task(json='{"question": "3+4=?"}'),
            sample=2,
            group_number=5,
            tokens_left=self.budget - self.generated,
            turns_left=self.turn_limit - sum(bool(t.finish) for t in self.turns),
            sequences=[self.sequences[i] for i in sorted(self.sequences)],
            turns=sorted(self.turns, key=lambda t: (t.index, t.part)),
            tool_sessions=self.tool_sessions,
            environments=[wire.ToolEnvRoute(environment="toy", endpoint=self.address)],
        )

    def place(self, engine: Engine, **changes) -> Place:
        return Place(
            **{
                "replica": "replicas/a",
                "generation": 3,
                "engine": engine,
                "environments": self.environments,
                "blobs": self.blobs,
                "report": self.report,
                "history": History(None, "test"),
                **changes,
            }
        )

    def episode(self, engine: Engine, dialect=ChattyTags, **changes) -> Episode:
        lease = self.lease()
        return Episode(lease, self.run, lease.task.json, dialect(engine.codec), self.place(engine, **changes))

    def columns(self, sequence: int = 0) -> dict[str, np.ndarray]:
        """The joined segments of a sequence, checked for gaps."""
        parts, at = [], self.sequences[sequence].fork_position
        for part in sorted(self.sequences[sequence].segments, key=lambda s: s.first_position):
            assert part.first_position == at, "segments leave a gap or overlap"
            at += part.tokens
            parts.append(segment.decode(self.blobs.get(part.blob)))
        return {name: np.concatenate([p[name] for p in parts]) for name in parts[0]}


async def serving(core, model: Path | str = "fake", number: int = 0, **options) -> Engine:
    """A started engine that serves a model."""
    engine = Engine(core, **options)
    engine.start()
    await engine.load(Version(1, number), Weights(str(model)))
    return engine
