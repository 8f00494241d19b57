"""One leased trajectory, from its lease to its end: prompt, generate, register, call the tool, again, score.

Token-in, token-out: a turn's prompt is the exact ids so far (transcript.py says what is registered and when). A turn's
part is registered before its tool is called, so that after any crash the call has the id and the arguments it had. The
episode stops at any token when told to (`interrupt`): the engine hands over what it has, that is registered as a part
of the turn, and the trajectory is given back with its environment session open. Another worker rebuilds it from the
lease and goes on; budgets are what the lease says is left.
"""

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from services.common import log, segment, wire
from services.common.blobs import BlobStore
from services.common.errors import LibraError
from services.common.history import History
from services.common.session import SessionLost
from services.rollout.dialect import Dialect, Final, ToolCall
from services.rollout.draws import draw_state
from services.rollout.engine.base import DrawKey, Finish, GenerationRequest, Interruption, Outcome, Sampling
from services.rollout.engine.thread import Engine
from services.rollout.environment import EnvironmentFailure, Environments, EnvironmentSession
from services.rollout.transcript import Cut, Transcript, rebuild

_log = log.get(__name__)
T = TypeVar("T")

RECORD_SECONDS = 0.5
"""Longest that a tool's outcome waits for a report to carry it: most turns end sooner, and one report serves both."""

Report = Callable[[wire.Delta], Awaitable[list[wire.Refusal]]]
Called = Callable[[str, str, float], None]
"""Told of each tool call that ended: tool, outcome, seconds."""


class LeaseLost(Exception):
    """The scheduler refused a report as stale: the trajectory belongs to somebody else. Nothing more is said of it."""


class Interrupted(Exception):
    """Told to stop; what was generated is in the transcript."""


class Failed(Exception):
    """The attempt failed; class, code and text go into the end report."""

    def __init__(self, failure: int, code: str, text: str) -> None:
        super().__init__(text)
        self.failure, self.code, self.text = failure, code, text


@dataclass(frozen=True, slots=True)
class Place:
    """Where an episode runs: the replica under its generation, and what it uses."""

    replica: str
    generation: int
    engine: Engine
    environments: Environments
    blobs: BlobStore
    report: Report
    history: History
    session_epoch: int = 0
    call_seconds: float = 60.0
    score_seconds: float = 60.0
    session_seconds: float = 600.0
    """Wished life of an environment session between renewals."""
    kv_policy: int = wire.KV_POLICY_RECOMPUTE
    called: Called = lambda _tool, _outcome, _seconds: None


class Episode:
    """See the module. `run` is its only task; `interrupt` may be called at any time."""

    def __init__(
        self, lease: wire.TrajectoryLease, run: wire.Run, task_json: str, dialect: Dialect, place: Place
    ) -> None:
        self.lease = lease
        self.name = lease.trajectory
        self.ended_how = ""
        """How it ended: reward, the failure class, the interruption, or dropped; empty while it runs."""
        self.generated = 0
        """Tokens generated in the attempt, those not registered yet included."""
        self.registered = 0
        """Of these, acknowledged by the scheduler."""
        self.ending = False
        """True once its end is being reported; from then on it is not to be cancelled."""
        self._run, self._task, self._dialect, self._place = run, task_json, dialect, place
        self._transcript = Transcript()
        self._environment: EnvironmentSession | None = None
        self._tokens_left = lease.tokens_left
        self._turns_left = lease.turns_left
        self._interruption: Interruption | None = None
        self._at_turn_end: Interruption | None = None
        self._stop = asyncio.Event()
        self._request = ""
        self._generations = 0
        self._known_sequences = len(lease.sequences)
        self._unsent: list[wire.Turn] = []
        """Tool records that the next report carries."""
        self._sending = asyncio.Lock()
        self._late: asyncio.TimerHandle | None = None
        self._refused: BaseException | None = None
        self._asides: set[asyncio.Task[Any]] = set()
        sampling = run.sampling
        self._sampling = Sampling(
            sampling.temperature if sampling.HasField("temperature") else 1.0,
            sampling.top_p if sampling.HasField("top_p") else 1.0,
            sampling.top_k,
        )

    # ---- what the agent calls

    @property
    def waits_for_tool(self) -> bool:
        """True if nothing is being generated."""
        return not self._request

    def interrupt(self, why: Interruption, *, at_turn_end: bool = False) -> None:
        """Stops at the next token, or at the next tool call or turn end; the first reason given counts."""
        if at_turn_end and not self.waits_for_tool:
            self._at_turn_end = self._at_turn_end or why
            return
        self._interruption = self._interruption or why
        self._stop.set()
        if self._request:
            self._place.engine.abort(self._request, self._interruption)

    def withdraw_turn_end(self) -> None:
        """The wish to stop at the turn's end no longer holds."""
        self._at_turn_end = None

    async def run(self) -> None:
        """Plays the episode and reports its end. Returns in every case; cancelled, it drops everything silently."""
        timer = None
        if self.lease.HasField("time_left"):
            seconds = max(0.0, wire.seconds(self.lease.time_left))
            timer = asyncio.get_running_loop().call_later(seconds, self.interrupt, Interruption.DEADLINE)
        try:
            end = await self._play_to_end()
            await self._report_end(end)
        except LeaseLost:
            self.ended_how = "dropped"
        except Failed as error:
            self.ended_how = "refused"
            _log.error("the end was refused", trajectory=self.name, code=error.code, text=error.text)
        except asyncio.CancelledError:
            self.ended_how = "dropped"
            if self._request:
                self._place.engine.abort(self._request, Interruption.CANCELLED)
            raise
        finally:
            if timer is not None:
                timer.cancel()
            if self._late is not None:
                self._late.cancel()
            for task in self._asides:
                task.cancel()
            for line in self._transcript.lines:
                self._place.engine.forget(self._prefix_key(line.index))

    async def close_environment(self) -> None:
        """Ends the environment session, if one is known."""
        if self._environment is not None:
            await self._environment.close()

    # ---- from beginning to end

    async def _play_to_end(self) -> wire.TrajectoryEnd:
        end = wire.TrajectoryEnd(trajectory=self.name, attempt=self.lease.attempt, lease_epoch=self.lease.lease_epoch)
        try:
            try:
                end.reward.CopyFrom(await self._play())
                self.ended_how = "reward"
            except EnvironmentFailure as error:
                raise Failed(wire.FAILURE_CLASS_ENVIRONMENT, error.code, error.text) from error
            except LibraError as error:
                failure = (
                    wire.FAILURE_CLASS_DATA_LOSS if error.reason == "BLOB_MISMATCH" else wire.FAILURE_CLASS_EPISODE
                )
                raise Failed(failure, error.reason, error.message) from error
        except Interrupted:
            if self._interruption == Interruption.DEADLINE:
                self._fail(end, wire.FAILURE_CLASS_DEADLINE, "MAX_RUN_TIME", "the trajectory's running time is over")
            else:
                end.interrupted = wire.Interruption.ValueType(self._interruption or Interruption.LOST)
                self.ended_how = wire.Interruption.Name(end.interrupted).removeprefix("INTERRUPTION_")
        except Failed as error:
            self._fail(end, error.failure, error.code, error.text)
        except (LeaseLost, asyncio.CancelledError):
            raise
        except Exception as error:  # noqa: BLE001 - a defect met on this item fails this item alone
            _log.error("episode failed", trajectory=self.name, error=repr(error), exc_info=error)
            self._fail(end, wire.FAILURE_CLASS_EPISODE, "INTERNAL", f"{type(error).__name__} in the episode")
        try:
            await self._send_records()
        except Failed as error:
            self._fail(end, error.failure, error.code, error.text)
        return end

    def _fail(self, end: wire.TrajectoryEnd, failure: int, code: str, text: str) -> None:
        self.ended_how = wire.FailureClass.Name(wire.FailureClass.ValueType(failure)).removeprefix("FAILURE_CLASS_")
        end.failure.failure = wire.FailureClass.ValueType(failure)
        end.failure.reason.CopyFrom(wire.Reason(code=code[:64], text=text[:1024]))
        _log.warning("attempt failed", trajectory=self.name, failure=self.ended_how, code=code, text=text)

    async def _play(self) -> wire.Reward:
        lease = self.lease
        if self._place.engine.version is None:
            self.interrupt(Interruption.LOST)
            raise Interrupted
        self._transcript = await asyncio.to_thread(rebuild, lease.sequences, lease.turns, self._place.blobs.get)
        self.generated = self.registered = self._transcript.generated
        prompt = await self._aside(self._open_environment())
        self._spawn(self._keep_session())
        if not self._transcript.length:
            self._transcript.read(prompt)
            room = self._max_sequence()
            if len(prompt) >= room:
                raise Failed(
                    wire.FAILURE_CLASS_EPISODE, "PROMPT_TOO_LONG",
                    f"the prompt has {len(prompt)} tokens; the context of {room} leaves none to generate: shorten the "
                    "task, or raise max_sequence_tokens and the model's context",
                )  # fmt: skip
        while True:
            if not self._transcript.finish or self._next_is_open():
                await self._generate()
            if self._transcript.over:
                break
            if await self._use_tool():
                break
        turn = self._transcript.last_turn
        said = self._dialect.parse(self._transcript.turn_ids(turn), Finish(self._transcript.finish))
        assert self._environment is not None
        answer = said.answer if isinstance(said, Final) else ""
        return await self._aside(self._environment.score(answer, self._place.score_seconds))

    def _next_is_open(self) -> bool:
        """True if the tool's answer to the newest turn is among the tokens already."""
        line, last = self._transcript.line, self._transcript.turns[-1]
        read_on = len(line.ids) > last.first_position + last.generated_tokens or line.index != last.sequence
        return read_on and not self._transcript.over

    # ---- the environment

    async def _open_environment(self) -> list[int]:
        """Attaches, or opens and returns the prompt's ids."""
        lease, place = self.lease, self._place
        if lease.tool_sessions:
            self._environment = await EnvironmentSession.attach(place.environments, lease.tool_sessions[0], lease)
            if self._transcript.length:
                return []
        wanted = lease.task.environment or self._run.environment
        routes = [r for r in lease.environments if not wanted or r.environment == wanted] or list(lease.environments)
        if not routes and lease.tool_sessions:
            old = lease.tool_sessions[0]
            routes = [wire.ToolEnvRoute(environment=old.environment, endpoint=old.endpoint)]
        if not routes:
            raise Failed(
                wire.FAILURE_CLASS_EPISODE, "NO_ENVIRONMENT",
                f"the lease names no address for the tool environment {wanted!r}; give it in the run's tool_envs",
            )  # fmt: skip
        seed = draw_state(self._run.seed, lease.group_number, lease.sample, 0) >> 1
        self._environment, instructions, observation = await EnvironmentSession.open(
            place.environments, routes[0], lease, self._task, seed, place.session_seconds
        )
        return self._dialect.prompt_ids(instructions, observation)

    async def _keep_session(self) -> None:
        assert self._environment is not None
        with contextlib.suppress(EnvironmentFailure):  # the next call to the environment says what is wrong
            await self._environment.keep(self._place.session_seconds)

    async def _use_tool(self) -> bool:
        """Runs (or finds) the newest turn's tool call and reads its output; True if the episode is over with it."""
        transcript, environment = self._transcript, self._environment
        assert environment is not None
        turn = transcript.last_turn
        said = self._dialect.parse(transcript.turn_ids(turn), Finish.TOOL_CALL)
        assert isinstance(said, ToolCall)
        call_id = f"{self.lease.attempt}-{transcript.calls - 1}"
        if self._at_turn_end is not None:
            self.interrupt(self._at_turn_end)
        began = time.monotonic()
        try:
            work = environment.call(call_id, said.tool, said.arguments_json, self._place.call_seconds)
            call = await self._aside(work)
        except EnvironmentFailure:
            self._place.called(environment.label(said.tool), "INFRA_ERROR", time.monotonic() - began)
            raise
        if not transcript.recorded:
            seconds = time.monotonic() - began
            await self._record_call(call_id, said, call)
            outcome = wire.ToolOutcome.Name(call.outcome).removeprefix("TOOL_OUTCOME_")
            self._place.called(environment.label(said.tool), outcome, seconds)
        if call.episode_done:
            return True
        output = call.output
        if call.outcome == wire.TOOL_OUTCOME_TIMEOUT:
            output = output or "timeout"
        elif call.outcome == wire.TOOL_OUTCOME_TOOL_ERROR:
            output = output or "error"
        prompt = self._dialect.next_prompt(transcript.line.ids, output)
        if transcript.extend_to(prompt, wire.FORK_REASON_DRIFT):
            _log.warning("token ids drifted between turns; forked", trajectory=self.name, turn=turn + 1)
        if self._room() <= 0:
            await self._register(Finish.LENGTH, None, None, turn=(turn, transcript.turns[-1].part + 1))
            return True
        return False

    async def _record_call(self, call_id: str, said: ToolCall, call: wire.ToolCall) -> None:
        """Adds a call's outcome as a part of its turn without tokens; the next report carries it, or one of its own.

        Nothing is lost by the delay: until it is registered, whoever goes on asks for the call again, by the same id.
        """
        assert self._environment is not None
        kind = await self._aside(self._environment.tool_kind(said.tool))
        record = wire.ToolCallRecord(
            call_id=call_id, session=self._environment.record.session, epoch=self.lease.lease_epoch, tool=said.tool,
            kind=wire.ToolKind.ValueType(kind), outcome=call.outcome,
            payload_class=call.payload_class[:64], output_bytes=len(call.output.encode()),
            arguments_sha256=hashlib.sha256(said.arguments_json.encode()).hexdigest(),
            output_sha256=hashlib.sha256(call.output.encode()).hexdigest(), latency=call.latency,
        )  # fmt: skip
        last = self._transcript.turns[-1]
        turn = wire.Turn(
            index=last.index, part=last.part + 1, sequence=last.sequence, replica=self._place.replica,
            first_position=last.first_position + last.generated_tokens, generation=self._place.generation,
            prompt_tokens=last.first_position + last.generated_tokens, tool_calls=[record],
        )  # fmt: skip
        self._transcript.turns.append(turn)
        self._unsent.append(turn)
        if self._late is None:
            self._late = asyncio.get_running_loop().call_later(RECORD_SECONDS, self._send_late)

    def _send_late(self) -> None:
        self._late = None
        if self._unsent:
            self._spawn(self._send_records()).add_done_callback(self._recorded)

    async def _send_records(self) -> None:
        """Registers tool records that no report has carried yet."""
        if self._unsent or self._refused is not None:
            await self._send_progress(turns=[])

    def _recorded(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            # the next report raises it; generation need not go on until then
            self._refused = error
            self.interrupt(Interruption.LOST)

    # ---- generating

    def _max_sequence(self) -> int:
        asked = self._run.limits.max_sequence_tokens
        context = self._place.engine.max_sequence_tokens
        return min(asked, context) if asked else context

    def _room(self) -> int:
        """Tokens that the present turn may still generate."""
        turn, _ = self._transcript.next_part()
        room = min(self._tokens_left, self._max_sequence() - self._transcript.length)
        limit = self._run.sampling.max_turn_tokens
        return min(room, limit - self._transcript.turn_generated(turn)) if limit else room

    async def _generate(self) -> None:
        """One turn, or what is left of it, registered when it returns. Interrupted and Failed as they say."""
        transcript, engine = self._transcript, self._place.engine
        self._check_stop()
        turn, part = transcript.next_part()
        room = self._room()
        if room <= 0:
            if part == 0:
                raise Failed(wire.FAILURE_CLASS_EPISODE, "NO_BUDGET", "the lease leaves no token to generate")
            await self._register(Finish.LENGTH, None, None)
            return
        self._generations += 1
        lease = self.lease
        request = GenerationRequest(
            request_id=f"{self.name}/{lease.lease_epoch}/{turn}.{part}.{self._generations}",
            prompt_ids=list(transcript.line.ids),
            max_tokens=room,
            sampling=self._sampling,
            stop_ids=self._dialect.stop_ids,
            draw=DrawKey(self._run.seed, lease.group_number, lease.sample, transcript.line.index, transcript.length),
            prefix_key=self._prefix_key(transcript.line.index),
        )
        before = self.generated
        stream = engine.submit(request)
        self._request = request.request_id
        if self._interruption is not None:
            engine.abort(self._request, self._interruption)
        try:
            async for chunk in stream:
                transcript.wrote(chunk)
                self.generated += len(chunk)
                self._tokens_left -= len(chunk)
                self._place.history.write(
                    "generated", trajectory=self.name, attempt=lease.attempt, lease_epoch=lease.lease_epoch,
                    generated=self.generated,
                )  # fmt: skip
        except LibraError as error:
            self._request = ""
            if error.reason in ("ENGINE_STATE", "CAPACITY"):
                self.interrupt(Interruption.LOST)
                raise Interrupted from error
            raise
        self._request = ""
        outcome = stream.outcome
        assert outcome is not None
        await self._conclude(outcome, self.generated - before)

    async def _conclude(self, outcome: Outcome, received: int) -> None:
        """Registers what a generation came to, whatever its end."""
        if outcome.error:
            await self._register(None, Interruption.LOST, outcome)
            raise Failed(wire.FAILURE_CLASS_ENGINE, "ENGINE_DIED", f"{self._place.replica}: {outcome.error}")
        if outcome.total_tokens != received:
            raise Failed(
                wire.FAILURE_CLASS_ENGINE, "TOKENS_MISSING",
                f"{self._place.replica} says {outcome.total_tokens} tokens, {received} were received",
            )  # fmt: skip
        if outcome.interruption is not None:
            self.interrupt(outcome.interruption)
            await self._register(None, outcome.interruption, outcome)
            raise Interrupted
        if not received:
            raise Failed(
                wire.FAILURE_CLASS_ENGINE, "EMPTY_SUCCESS", f"{self._place.replica} reported success without a token"
            )
        await self._register(outcome.finish, None, outcome)

    def _prefix_key(self, sequence: int) -> str:
        return f"{self.name}/{self.lease.attempt}/{sequence}"

    def _check_stop(self) -> None:
        if self._interruption is not None:
            raise Interrupted

    # ---- registering

    async def _register(
        self,
        finish: Finish | None,
        interruption: Interruption | None,
        outcome: Outcome | None,
        turn: tuple[int, int] | None = None,
    ) -> None:
        """Writes the unregistered tokens as a segment, durable first, and reports it with its part of the turn."""
        transcript = self._transcript
        index, part = turn or transcript.next_part()
        cut = transcript.cut()
        generated = cut.generated if cut is not None else 0
        if generated == 0 and finish is None:
            await self._send_progress(turns=[])  # nothing to keep but the environment session
            return
        if finish == Finish.TOOL_CALL:
            self._turns_left -= 1
        cut_short = finish == Finish.LENGTH or (
            finish == Finish.TOOL_CALL and (self._turns_left <= 0 or self._tokens_left <= 0)
        )
        first = transcript.length - generated
        message = wire.Turn(
            index=index, part=part, sequence=transcript.line.index, first_position=first, prompt_tokens=first,
            replica=self._place.replica, generation=self._place.generation, generated_tokens=generated,
            finish=wire.FinishReason.ValueType(finish or 0), truncated=cut_short,
            interruption=wire.Interruption.ValueType(interruption or 0),
        )  # fmt: skip
        if outcome is not None:
            message.cached_tokens = outcome.cached_tokens
            message.engine_wait.CopyFrom(wire.duration(outcome.wait_seconds))
            message.engine_time.CopyFrom(wire.duration(outcome.run_seconds))
        transcript.turns.append(message)
        await self._send_progress(turns=[message], cut=cut)

    async def _send_progress(self, turns: list[wire.Turn], cut: Cut | None = None) -> None:
        """Reports in the order of the calls: one report of an episode is on its way at a time."""
        async with self._sending:
            if self._refused is not None:
                refused, self._refused = self._refused, None
                raise refused
            unsent, self._unsent = self._unsent, []
            if self._late is not None:
                self._late.cancel()
                self._late = None
            await self._report_progress([*unsent, *turns], cut)

    async def _report_progress(self, turns: list[wire.Turn], cut: Cut | None) -> None:
        lease, transcript = self.lease, self._transcript
        progress = wire.TrajectoryProgress(
            trajectory=self.name, attempt=lease.attempt, lease_epoch=lease.lease_epoch, turns=turns
        )
        written = None
        if cut is not None:
            line = transcript.lines[cut.sequence]
            sequence = wire.Sequence(
                index=line.index, fork_position=line.fork_position,
                fork_reason=wire.ForkReason.ValueType(line.fork_reason),
            )  # fmt: skip
            if line.parent is not None:
                sequence.parent = line.parent
            written = await self._write(cut)
            sequence.segments.append(written)
            progress.sequences.append(sequence)
        if self._environment is not None:
            record = self._environment.record
            record.next_call = sum(bool(t.tool_calls) for t in transcript.turns)
            progress.tool_sessions.append(record)
        elif not turns:
            return
        generated = sum(t.generated_tokens for t in turns)
        await self._send(wire.Delta(progress=[progress]))
        self.registered += generated
        if cut is not None and written is not None:
            self._place.history.write(
                "acked", trajectory=self.name, attempt=lease.attempt, lease_epoch=lease.lease_epoch,
                sequence=cut.sequence, first_position=cut.first_position, tokens=cut.tokens,
                trainable_tokens=cut.generated, sha256=written.blob.sha256, uri=written.blob.uri,
                session_epoch=self._place.session_epoch,
            )  # fmt: skip

    async def _write(self, cut: Cut) -> wire.Segment:
        data = segment.encode(cut.columns)
        run, _, trajectory = self.name.removeprefix("runs/").partition("/trajectories/")
        digest = hashlib.sha256(data).hexdigest()
        key = f"{run}/{trajectory}/{self.lease.attempt}/{cut.sequence}-{digest}.safetensors"
        blob = await asyncio.to_thread(self._place.blobs.put, key, data)
        greedy = self._sampling.temperature <= 0
        widths = {"weight_version": 2}
        return wire.Segment(
            blob=blob, first_position=cut.first_position, tokens=cut.tokens, trainable_tokens=cut.generated,
            columns=[
                wire.Column(name=name, dtype=str(column.dtype), width=widths.get(name, 1))
                for name, column in cut.columns.items()
            ],
            versions=cut.spans, logprob_kind=wire.LOGPROB_KIND_RAW if greedy else wire.LOGPROB_KIND_SAMPLED,
            sampling=self._run.sampling, engine_build=self._place.engine.build, dtype=self._place.engine.dtype,
            kv_policy=wire.KvPolicy.ValueType(self._place.kv_policy),
        )  # fmt: skip

    async def _report_end(self, end: wire.TrajectoryEnd) -> None:
        self.ending = True
        try:
            await self._send(wire.Delta(ends=[end]))
        except Failed as error:
            # an end that the scheduler does not accept must not leave the trajectory leased for ever
            self._fail(end, error.failure, error.code, error.text)
            await self._send(wire.Delta(ends=[end]))
        self._place.history.write(
            "ended", trajectory=self.name, attempt=self.lease.attempt, lease_epoch=self.lease.lease_epoch,
            how=self.ended_how,
        )  # fmt: skip
        if self.ended_how == "reward":
            await self.close_environment()

    async def _send(self, delta: wire.Delta) -> None:
        """Reports and waits for the commit. LeaseLost if this lease is no longer the current one."""
        try:
            refusals = await self._place.report(delta)
        except SessionLost as error:
            raise LeaseLost(self.name) from error
        for refusal in refusals:
            if refusal.name != self.name:
                continue  # of another caller's part in the same report
            if refusal.reason.code in ("STALE_ATTEMPT", "STALE_FENCE", "NOT_FOUND"):
                raise LeaseLost(self.name)
            raise Failed(wire.FAILURE_CLASS_EPISODE, refusal.reason.code, f"report refused: {refusal.reason.text}")

    # ---- waiting

    def _spawn(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        task = asyncio.create_task(work)
        self._asides.add(task)
        task.add_done_callback(self._asides.discard)
        return task

    async def _aside(self, work: Coroutine[Any, Any, T]) -> T:
        """Waits for work at the environment, or stops waiting when interrupted.

        The call itself is let go on: it has a deadline, and its result is stored at the environment under its id.
        """
        if self._stop.is_set():
            work.close()
            raise Interrupted
        task = asyncio.create_task(work)
        stop = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            task.add_done_callback(_swallow)
            _LET_GO.add(task)
            raise Interrupted
        except asyncio.CancelledError:
            task.cancel()
            raise
        finally:
            stop.cancel()


_LET_GO: set["asyncio.Task[Any]"] = set()
"""Calls that nobody waits for; each ends by its own deadline, at most one for each episode that was interrupted."""


def _swallow(task: "asyncio.Task[Any]") -> None:
    _LET_GO.discard(task)
    if not task.cancelled():
        task.exception()
