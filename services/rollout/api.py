"""RolloutService: direct calls on the worker's engine, for agent loops that run elsewhere."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
from libra.v1 import common_pb2, rollout_service_pb2, rollout_service_pb2_grpc, trajectory_pb2

from services.common import errors, wire
from services.rollout.agent import RolloutAgent
from services.rollout.dialect import open_dialect
from services.rollout.engine.base import DrawKey, GenerationRequest, Interruption, Outcome, Sampling, Tokens
from services.rollout.holding import Holding
from services.rollout.transcript import version_spans

MAX_CHUNK = 4_096
MAX_KNOWN = 1_024
"""Generations whose tokens are kept for AbortResponse and for callers that join again."""


class _Generation:
    """A generation of a client: what it has so far; any number of callers may read it."""

    def __init__(self) -> None:
        self.chunks: list[Tokens] = []
        self.outcome: Outcome | None = None
        self.error: errors.LibraError | None = None
        self.changed = asyncio.Condition()

    @property
    def over(self) -> bool:
        """True once nothing more will come."""
        return self.outcome is not None or self.error is not None

    @property
    def tokens(self) -> int:
        """Tokens so far."""
        return sum(len(c) for c in self.chunks)


class RolloutService(rollout_service_pb2_grpc.RolloutServiceServicer):
    """Generate, Abort and DescribeEngine; ReadKv is not implemented (no feature kv_move)."""

    def __init__(self, agent: RolloutAgent) -> None:
        self._agent = agent
        self._known: dict[str, _Generation] = {}
        self._pumps: set[asyncio.Task[None]] = set()

    async def DescribeEngine(
        self, request: rollout_service_pb2.DescribeEngineRequest, context: Any
    ) -> rollout_service_pb2.DescribeEngineResponse:
        """What the worker serves; nothing while it holds no replica."""
        del context
        agent, held = self._agent, self._agent.holding
        response = rollout_service_pb2.DescribeEngineResponse()
        if held is not None and request.replica in ("", held.replica):
            response.engines.add(
                replica=held.replica,
                generation=held.generation,
                activity=agent.activity(),
                weights=[agent.engine_weights()],
                engine_build=agent.engine.build,
                dtype=agent.engine.dtype,
                positional_seed=agent.engine.core.positional_seed,
                max_sequence_tokens=agent.engine.max_sequence_tokens,
                logprob_kind=trajectory_pb2.LOGPROB_KIND_SAMPLED,
            )
        return response

    async def Generate(
        self, request: rollout_service_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[rollout_service_pb2.GenerateResponse]:
        """Streams tokens from `resume_from` on; the same request id joins the same generation."""
        del context
        self._check(request.replica, request.fence)
        if not request.request_id:
            raise errors.invalid_field("request_id is missing; expected a UUID")
        generation = self._known.get(request.request_id)
        if generation is None:
            generation = self._begin(request)
        sent, position, first = request.resume_from, 0, True
        index = 0
        while True:
            async with generation.changed:
                while index == len(generation.chunks) and not generation.over:
                    await generation.changed.wait()
            while index < len(generation.chunks):
                chunk = generation.chunks[index]
                index += 1
                begin = max(0, sent - position)
                position += len(chunk)
                if begin < len(chunk):
                    for message in _messages(chunk, begin, position - len(chunk)):
                        if first and generation.outcome is not None:
                            message.cached_tokens = generation.outcome.cached_tokens
                        first = False
                        yield message
            if generation.error is not None:
                raise generation.error
            if generation.outcome is not None and index == len(generation.chunks):
                outcome = generation.outcome
                if outcome.error:
                    raise errors.engine_state(f"the engine died: {outcome.error}")
                yield rollout_service_pb2.GenerateResponse(
                    last=True,
                    total_tokens=outcome.total_tokens,
                    finish=trajectory_pb2.FinishReason.ValueType(outcome.finish or 0),
                    interruption=trajectory_pb2.Interruption.ValueType(outcome.interruption or 0),
                )
                return

    def _begin(self, request: rollout_service_pb2.GenerateRequest) -> _Generation:
        agent = self._agent
        served = agent.engine.version
        if served is None or agent.engine.codec is None:
            raise errors.engine_state(f"{request.replica} has no weights yet")
        if request.HasField("version") and (request.version.lineage, request.version.number) != (
            served.lineage,
            served.number,
        ):
            raise errors.LibraError(
                "VERSION_UNUSABLE",
                f"{request.replica} serves {served.lineage}-{served.number}",
                resource=request.replica,
            )
        sampling, draw = request.sampling, request.draw
        wanted = GenerationRequest(
            request_id=f"direct/{request.request_id}",
            prompt_ids=np.array(request.prompt_ids, np.int32),
            max_tokens=int(request.max_tokens),
            sampling=Sampling(
                sampling.temperature if sampling.HasField("temperature") else 1.0,
                sampling.top_p if sampling.HasField("top_p") else 1.0,
                sampling.top_k,
            ),
            stop_ids=open_dialect(agent.config.episodes.dialect, agent.engine.codec).stop_ids,
            draw=DrawKey(draw.seed, draw.group, draw.sample, draw.sequence, draw.first_position)
            if request.HasField("draw")
            else None,
        )
        while len(self._known) >= MAX_KNOWN:
            oldest = next((k for k, g in self._known.items() if g.outcome or g.error), None)
            if oldest is None:
                raise errors.LibraError("CAPACITY", f"{MAX_KNOWN} direct generations run", retry_after_s="1")
            del self._known[oldest]
        generation = self._known[request.request_id] = _Generation()
        task = asyncio.create_task(self._pump(generation, wanted))
        self._pumps.add(task)
        task.add_done_callback(self._pumps.discard)
        return generation

    async def _pump(self, generation: _Generation, wanted: GenerationRequest) -> None:
        """Reads the engine's stream whether or not a caller listens, so that a caller may come back."""
        stream = self._agent.engine.submit(wanted)
        error: errors.LibraError | None = None
        try:
            async for chunk in stream:
                async with generation.changed:
                    generation.chunks.append(chunk)
                    generation.changed.notify_all()
        except errors.LibraError as refused:
            error = refused
        async with generation.changed:
            generation.outcome, generation.error = stream.outcome, error
            generation.changed.notify_all()

    async def Abort(self, request: rollout_service_pb2.AbortRequest, context: Any) -> rollout_service_pb2.AbortResponse:
        """Stops a generation between two tokens; its stream still delivers what there is."""
        del context
        self._check(request.replica, request.fence)
        generation = self._known.get(request.target_request_id)
        if generation is None:
            raise errors.not_found(request.target_request_id)
        why = Interruption(request.interruption) if request.interruption else Interruption.CANCELLED
        self._agent.engine.abort(f"direct/{request.target_request_id}", why)
        async with generation.changed:
            await generation.changed.wait_for(lambda: generation.over)
        finished = generation.outcome is not None and generation.outcome.finish is not None
        return rollout_service_pb2.AbortResponse(total_tokens=generation.tokens, already_finished=finished)

    async def ReadKv(
        self, request: rollout_service_pb2.ReadKvRequest, context: Any
    ) -> AsyncIterator[rollout_service_pb2.ReadKvResponse]:
        """Not implemented: this engine has no feature kv_move; readers prefill."""
        del request, context
        raise errors.unimplemented("RolloutService.ReadKv")
        yield rollout_service_pb2.ReadKvResponse()

    def _check(self, replica: str, fence: common_pb2.Fence) -> Holding:
        held = self._agent.holding
        if held is None or held.replica != replica:
            raise errors.not_found(replica)
        if fence.generation != held.generation:
            raise errors.stale_fence(
                f"{replica} runs under generation {held.generation}; the call names {fence.generation}",
                resource=replica,
            )
        session = self._agent.session
        if session is not None and fence.term and fence.term < session.term:
            raise errors.stale_fence(f"term {fence.term} is below {session.term}, the highest seen", resource=replica)
        return held


def _messages(chunk: Tokens, begin: int, offset: int) -> list[wire.GenerateResponse]:
    """A chunk's tokens from `begin` on as messages of at most MAX_CHUNK; `offset` is its place in the generation."""
    messages = []
    for start in range(begin, len(chunk), MAX_CHUNK):
        end = min(len(chunk), start + MAX_CHUNK)
        versions = chunk.versions[start:end]
        messages.append(
            wire.GenerateResponse(
                ids=chunk.ids[start:end].tolist(),
                logprobs=chunk.logprobs[start:end].tolist(),
                versions=version_spans(versions, np.ones(len(versions), np.uint8), offset + start),
            )
        )
    return messages
