"""The reference engine: Hugging Face models on the CPU in float32, continuous batching over a slot cache of our own.

A step takes every running sequence one token further. Newcomers are prefilled in the same forward pass (attention.py
says how), a sequence that waits for a tool keeps its cache for its next turn, and after a weight switch everything that
runs is simply prefilled again. Nothing is done per token and sequence in Python: state lies in arrays by seat, and only
ends, chunks and newcomers cost a loop.
"""

import contextlib
import ctypes
import gc
import heapq
import secrets
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from services.common import errors, failpoints
from services.rollout.draws import draw_state, uniforms
from services.rollout.engine.base import (
    Codec,
    EngineLimits,
    EngineStats,
    Event,
    Finish,
    GenerationRequest,
    Interruption,
    Outcome,
    Tokens,
    Version,
    Weights,
)
from services.rollout.engine.model import build, check_state, same_shape
from services.rollout.engine.rows import Rows
from services.rollout.engine.sampling import sample

CONTEXT_STEP = 32
"""Cache lengths are rounded up to this, so that shapes repeat and their kernels and buffers are found again."""


@dataclass(slots=True)
class _Prepared:
    """A version beside the running one: a state for the present model, or a model of its own."""

    weights: Weights
    state: dict[str, Any]
    model: Any
    codec: Codec | None


@dataclass(slots=True)
class _Job:
    """A request in the engine."""

    request: GenerationRequest
    queued_at: float
    started_at: float = 0.0
    cached: int = 0


class TransformersCore:
    """See base.Core. `threads` are torch's intra-op threads."""

    dtype = "float32"
    positional_seed = True

    def __init__(self, limits: EngineLimits, threads: int = 1) -> None:
        import torch
        import transformers

        torch.set_num_threads(threads)
        self._torch = torch
        self.build = f"libra-transformers/{transformers.__version__}"
        self.limits = limits
        self.version: Version | None = None
        self.max_sequence_tokens = 0
        self.codec: Codec | None = None
        self._prepared: dict[Version, _Prepared] = {}
        self._model: Any = None
        self._source = ""
        self._cap = limits.max_sequences
        self._waiting: list[tuple[int, int, str]] = []
        self._jobs: dict[str, _Job] = {}
        self._seat_of: dict[str, int] = {}
        self._order = 0
        self._generated = self._prefilled = 0
        self._paused = 0.0
        self._token_seconds, self._token_count = 0.0, 0
        self._stepped_at = 0.0

    # ---- weights

    def prepare(self, version: Version, weights: Weights) -> None:
        """Reads weights beside the running ones. INVALID_FIELD if they do not fit the model."""
        torch = self._torch
        if not weights.shards or self._model is None or weights.model != self._source:
            model, codec = build(weights)
        else:
            model, codec = None, None
        state: dict[str, Any] = {}
        if weights.shards:
            import safetensors.torch

            for shard in weights.shards:
                state.update(safetensors.torch.load(shard))
            into = model if model is not None else self._model
            check_state(into, state)
            if model is not None:
                with torch.no_grad():
                    model.load_state_dict(state, strict=False)
                state = {}
        # one version beside the running one is enough, and bounds the memory
        self._prepared = {version: _Prepared(weights, state, model, codec)}

    def switch(self, version: Version) -> list[Event]:
        """Serves a prepared version. ENGINE_STATE if it was not prepared, or other work runs on another model."""
        started = time.monotonic()
        prepared = self._prepared.get(version)
        if prepared is None:
            raise errors.engine_state(
                f"version {version.lineage}-{version.number} was not prepared; send PREPARE first"
            )
        if prepared.model is not None:
            if self._model is not None and not same_shape(self._model, prepared.model) and self._jobs:
                raise errors.engine_state(f"{len(self._jobs)} requests run on another architecture; drain them first")
            fits = self._model is not None and same_shape(self._model, prepared.model)
            self._model, self.codec, self._source = prepared.model, prepared.codec, prepared.weights.model
            if not fits:
                self._allocate()
        else:
            with self._torch.no_grad():
                own = self._model.state_dict()
                for name, tensor in prepared.state.items():
                    if name in own:
                        own[name].copy_(tensor)
        self._prepared.clear()
        self.version = version
        # what was computed under the old weights is not used again: neither kept prefixes nor running ones
        self._rows.drop_all()
        self._fed[:] = 0
        self._paused += time.monotonic() - started
        return []

    def abandon(self, version: Version) -> None:
        """Drops a prepared version."""
        self._prepared.pop(version, None)

    def _allocate(self) -> None:
        torch, config = self._torch, self._model.config
        context = min(self.limits.max_context, int(config.max_position_embeddings))
        heads = int(config.num_attention_heads)
        kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
        size = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
        seats = self.limits.slots
        self.max_sequence_tokens = context
        self._vocabulary = int(config.vocab_size)
        # one row more than seats: scratch space for exchanges; untouched rows cost address space only
        self._cache = torch.zeros(2, int(config.num_hidden_layers), seats + 1, kv_heads, context, size)
        self._rows = Rows(seats, self._move)
        self._row_heads = torch.arange(kv_heads) * context
        self._row_stride = kv_heads * context
        self._columns = torch.arange(context)
        self._ids = np.zeros((seats, context), np.int32)
        self._logprobs = np.zeros((seats, context), np.float32)
        self._versions = np.zeros((seats, context, 2), np.int64)
        self._length = np.zeros(seats, np.int64)
        self._fed = np.zeros(seats, np.int64)
        self._start = np.zeros(seats, np.int64)
        self._sent = np.zeros(seats, np.int64)
        self._limit = np.zeros(seats, np.int64)
        self._draw = np.zeros(seats, np.uint64)
        self._draw_shift = np.zeros(seats, np.int64)
        self._temperature = np.ones(seats)
        self._top_p = np.ones(seats)
        self._top_k = np.zeros(seats, np.int64)
        self._stops = np.zeros((seats, self._vocabulary), np.int8)
        self._owner: list[str] = [""] * seats

    def _move(self, source: int, target: int, seat: int) -> None:
        length = int(self._fed[seat])
        if length:
            rows = self._cache.shape[2]
            self._cache[:, :, target % rows, :, :length] = self._cache[:, :, source % rows, :, :length]

    # ---- requests

    def submit(self, request: GenerationRequest) -> None:
        """Queues a request."""
        if self._model is None:
            raise errors.engine_state("the engine has no weights yet; load a version first")
        if request.request_id in self._jobs:
            raise errors.already_exists(request.request_id, "a generation of this id is in the engine")
        length = len(request.prompt_ids)
        if not 1 <= length < self.max_sequence_tokens:
            raise errors.invalid_field(
                f"a prompt of {length} tokens; this engine's context of {self.max_sequence_tokens} tokens allows 1 to "
                f"{self.max_sequence_tokens - 1}, with one left to generate"
            )
        if request.max_tokens < 1:
            raise errors.invalid_field(f"max_tokens is {request.max_tokens}; expected at least 1")
        top = max(int(max(request.prompt_ids)), max(request.stop_ids, default=0))
        if top >= self._vocabulary or int(min(request.prompt_ids)) < 0:
            raise errors.invalid_field(f"token id {top} is outside the model's vocabulary of {self._vocabulary}")
        if len(self._waiting) >= self.limits.max_waiting:
            raise errors.LibraError(
                "CAPACITY", f"{len(self._waiting)} generations wait already, the limit", retry_after_s="1"
            )
        self._jobs[request.request_id] = _Job(request, time.monotonic())
        self._order += 1
        heapq.heappush(self._waiting, (-request.priority, self._order, request.request_id))

    def abort(self, request_id: str, interruption: Interruption) -> list[Event]:
        """Ends a request with what it has."""
        if request_id not in self._jobs:
            return []
        seat = self._seat_of.get(request_id)
        if seat is None:
            self._waiting = [w for w in self._waiting if w[2] != request_id]
            heapq.heapify(self._waiting)
            job = self._jobs.pop(request_id)
            waited = time.monotonic() - job.queued_at
            return [Event(request_id, None, Outcome(0, interruption=interruption, wait_seconds=waited))]
        return [self._end(seat, interruption=interruption)]

    def forget(self, prefix_key: str) -> None:
        """Drops a kept cache."""
        if self._model is not None and prefix_key in self._rows.kept:
            self._rows.drop(prefix_key)

    def set_concurrency(self, sequences: int) -> None:
        """Bounds running sequences; those that run go on."""
        self._cap = max(1, min(sequences, self.limits.max_sequences))

    def has_work(self) -> bool:
        """True while any request is in the engine."""
        return bool(self._jobs)

    # ---- a step

    def step(self) -> list[Event]:
        """One token for each running sequence."""
        failpoints.hit("engine.step")
        now = time.monotonic()
        self._admit(now)
        seats, plan, ids, positions, last = self._plan()
        if not len(seats):
            return []
        logits = self._forward(plan, ids, positions, last)
        self._fed[seats] = self._length[seats]
        return self._append(seats, logits, now)

    def _admit(self, now: float) -> None:
        rows = self._rows
        budget = self.limits.prefill_tokens
        while self._waiting and rows.running < self._cap and budget > 0:
            job = self._jobs[heapq.heappop(self._waiting)[2]]
            request = job.request
            prompt = np.asarray(request.prompt_ids, np.int32)
            if request.prefix_key and request.prefix_key in rows.kept:
                seat = rows.take_kept(request.prefix_key)
                most = min(int(self._fed[seat]), len(prompt) - 1)
                differs = np.flatnonzero(self._ids[seat, :most] != prompt[:most])
                job.cached = int(differs[0]) if len(differs) else most
            else:
                seat = rows.take()
            job.started_at = now
            self._seat_of[request.request_id] = seat
            self._owner[seat] = request.request_id
            self._fed[seat] = job.cached
            self._ids[seat, : len(prompt)] = prompt
            self._length[seat] = self._start[seat] = self._sent[seat] = len(prompt)
            self._limit[seat] = min(len(prompt) + request.max_tokens, self.max_sequence_tokens)
            draw, sampling = request.draw, request.sampling
            self._draw[seat] = (
                draw_state(draw.seed, draw.group, draw.sample, draw.sequence) if draw else secrets.randbits(64)
            )
            self._draw_shift[seat] = draw.first_position - len(prompt) if draw else 0
            self._temperature[seat], self._top_p[seat] = sampling.temperature, sampling.top_p
            self._top_k[seat] = sampling.top_k
            self._stops[seat] = 0
            for stop, finish in request.stop_ids.items():
                self._stops[seat, stop] = finish
            budget -= len(prompt) - job.cached

    def _plan(self) -> tuple[npt.NDArray[np.int64], Any, npt.NDArray[np.int32], npt.NDArray[np.int64], Any]:
        """Who goes on in this step: seats, the cache plan, flat ids and positions, and which flat tokens are last."""
        from services.rollout.engine.attention import Step

        order = np.array(self._rows.seat_at[: self._rows.running], np.int64)
        ahead = self._length[order] - self._fed[order]
        decoding = np.flatnonzero(ahead == 1)
        filling: list[int] = []
        budget = self.limits.prefill_tokens
        for row in np.flatnonzero(ahead > 1).tolist():
            if filling and ahead[row] > budget:
                break
            filling.append(row)
            budget -= int(ahead[row])
        spans, seats, ids, positions, rows = [], [], [], [], []
        if len(decoding):
            mine = order[decoding]
            at = self._length[mine] - 1
            spans.append(self._span(decoding, at, np.ones(len(decoding), np.int64), 0))
            seats.append(mine)
            ids.append(self._ids[mine, at])
            positions.append(at)
            rows.append(decoding)
        if filling:
            index = np.array(filling, np.int64)
            mine, pieces = order[index], ahead[index]
            spans.append(self._span(index, self._fed[mine], pieces, len(decoding)))
            seats.append(mine)
            for row, seat in zip(filling, mine.tolist(), strict=True):
                fed, end = int(self._fed[seat]), int(self._length[seat])
                ids.append(self._ids[seat, fed:end])
                positions.append(np.arange(fed, end))
                rows.append(np.full(end - fed, row))
            self._prefilled += int(pieces.sum())
        if not seats:
            return np.zeros(0, np.int64), None, np.zeros(0, np.int32), np.zeros(0, np.int64), None
        where = np.concatenate(positions)
        torch = self._torch
        base = torch.from_numpy(np.concatenate(rows) * self._row_stride + where)
        write = (base[:, None] + self._row_heads[None, :]).reshape(-1)
        pieces = np.concatenate(
            [np.ones(len(decoding), np.int64), ahead[filling] if filling else np.zeros(0, np.int64)]
        )
        last = torch.from_numpy(pieces.cumsum() - 1)
        return np.concatenate(seats), Step(self._cache, write, spans), np.concatenate(ids), where, last

    def _span(
        self, rows: npt.NDArray[np.int64], starts: npt.NDArray[np.int64], pieces: npt.NDArray[np.int64], first: int
    ) -> Any:
        from services.rollout.engine.attention import Span

        torch = self._torch
        size, width = len(rows), int(pieces.max())
        longest = int((starts + pieces).max())
        context = min(self.max_sequence_tokens, -(-longest // CONTEXT_STEP) * CONTEXT_STEP)
        # position of each (sequence, piece) token; a column is visible up to it, so padding sees something too
        at = torch.from_numpy(starts[:, None] + np.arange(width)[None, :])
        hidden = self._columns[:context] > at[:, :, None]
        mask = torch.zeros(size, width, context).masked_fill_(hidden, float("-inf")).unsqueeze(1)
        neighbours = int(rows[-1]) - int(rows[0]) == size - 1
        index = slice(int(rows[0]), int(rows[-1]) + 1) if neighbours else torch.from_numpy(rows)
        padded = None
        tokens = int(pieces.sum())
        if tokens != size * width:
            padded = torch.from_numpy(np.flatnonzero((np.arange(width)[None, :] < pieces[:, None]).reshape(-1)))
        return Span(index, size, width, context, mask, first, tokens, padded)

    def _forward(
        self, plan: Any, ids: npt.NDArray[np.int32], positions: npt.NDArray[np.int64], last: Any
    ) -> npt.NDArray[np.float32]:
        torch = self._torch
        with torch.inference_mode():
            hidden = self._model.base_model(
                input_ids=torch.from_numpy(ids.astype(np.int64)).unsqueeze(0),
                position_ids=torch.from_numpy(positions).unsqueeze(0),
                use_cache=False,
                slot_step=plan,
            ).last_hidden_state[0]
            logits: npt.NDArray[np.float32] = self._model.get_output_embeddings()(hidden[last]).float().numpy()
        return logits

    def _append(self, seats: npt.NDArray[np.int64], logits: npt.NDArray[np.float32], began: float) -> list[Event]:
        at = self._length[seats]
        draws = uniforms(self._draw[seats], at + self._draw_shift[seats])
        ids, logprobs = sample(logits, draws, self._temperature[seats], self._top_p[seats], self._top_k[seats])
        self._ids[seats, at] = ids
        self._logprobs[seats, at] = logprobs
        assert self.version is not None
        self._versions[seats, at] = (self.version.lineage, self.version.number)
        self._length[seats] = at + 1
        self._generated += len(seats)
        self._token_seconds += (time.monotonic() - max(began, self._stepped_at)) * len(seats)
        self._token_count += len(seats)
        self._stepped_at = time.monotonic()
        stopped = self._stops[seats, ids]
        ended = (stopped > 0) | (at + 1 >= self._limit[seats])
        due = ended | (at + 1 - self._sent[seats] >= self.limits.chunk_tokens)
        events = []
        for i in np.flatnonzero(due):
            seat = int(seats[i])
            if ended[i]:
                events.append(self._end(seat, finish=Finish(int(stopped[i])) if stopped[i] else Finish.LENGTH))
            else:
                events.append(Event(self._owner[seat], self._chunk(seat)))
        return events

    def _chunk(self, seat: int) -> Tokens | None:
        first, end = int(self._sent[seat]), int(self._length[seat])
        if first == end:
            return None
        self._sent[seat] = end
        return Tokens(
            self._ids[seat, first:end].copy(),
            self._logprobs[seat, first:end].copy(),
            self._versions[seat, first:end].copy(),
        )

    def _end(self, seat: int, finish: Finish | None = None, interruption: Interruption | None = None) -> Event:
        tokens = self._chunk(seat)
        request_id = self._owner[seat]
        job = self._jobs.pop(request_id)
        del self._seat_of[request_id]
        self._owner[seat] = ""
        # only a tool call is followed by another turn of the same sequence on this engine
        self._rows.end(seat, job.request.prefix_key if finish == Finish.TOOL_CALL else "")
        outcome = Outcome(
            int(self._length[seat] - self._start[seat]), finish, interruption, "", job.cached,
            job.started_at - job.queued_at, time.monotonic() - job.started_at,
        )  # fmt: skip
        return Event(request_id, tokens, outcome)

    # ---- the rest

    def stats(self) -> EngineStats:
        """Load and counters; seconds_per_token since the last call."""
        per_token = self._token_seconds / self._token_count if self._token_count else 0.0
        self._token_seconds, self._token_count = 0.0, 0
        used = running = capacity = 0
        if self._model is not None:
            rows = self._rows
            busy = rows.seat_at[: rows.running + len(rows.kept)]
            used, running = int(self._length[busy].sum()) if busy else 0, rows.running
            capacity = rows.count * self.max_sequence_tokens
        return EngineStats(
            running, len(self._waiting), capacity, used, self._generated, self._prefilled, 0, self._paused, per_token
        )

    def release(self) -> list[Event]:
        """Frees model, cache and everything prepared, and returns the memory to the system."""
        events = [event for request_id in list(self._jobs) for event in self.abort(request_id, Interruption.LOST)]
        self._prepared.clear()
        if self._model is not None:
            self._model = self._cache = self._rows = self._stops = None  # type: ignore[assignment]
            self._ids = self._logprobs = self._versions = np.zeros((0, 0))  # type: ignore[assignment]
        self.version, self.codec, self._source, self.max_sequence_tokens = None, None, "", 0
        gc.collect()
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)  # glibc keeps freed memory otherwise, and the node agent measures it
        return events
