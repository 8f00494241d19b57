"""An engine without a model: tokens come from a script. For tests of everything around an engine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from services.common import errors
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

Script = Callable[[Sequence[int]], int]
"""The next token of a sequence, from all of its ids so far; EMPTY ends it as a success without that token."""
EMPTY = -1
FAKE_LOGPROB = -0.5


@dataclass(slots=True)
class _Row:
    request: GenerationRequest
    ids: list[int]
    versions: list[tuple[int, int]] = field(default_factory=list)
    sent: int = 0


class CharCodec:
    """Characters by code point above the special tokens' ids, which are those of the libra-tags dialect."""

    SPECIAL = ("<pad>", "<bos>", "<eos>", "<call>", "</call>", "<out>", "</out>", "<ans>", "</ans>")

    def encode(self, text: str) -> list[int]:
        """Ids of text."""
        return [ord(c) for c in text]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids."""
        return "".join(chr(i) for i in ids if i >= len(self.SPECIAL))

    def special(self, token: str) -> int:
        """Id of a special token."""
        return self.SPECIAL.index(token)


class FakeCore:
    """See base.Core. Running sequences get one scripted token a step, whatever the version."""

    build = "libra-fake/1"
    dtype = "float32"
    positional_seed = True

    def __init__(self, script: Script, limits: EngineLimits | None = None, codec: Codec | None = None) -> None:
        self.limits = limits or EngineLimits()
        self.version: Version | None = None
        self.max_sequence_tokens = 0
        self.codec: Codec | None = None
        self._script = script
        self._codec = codec or CharCodec()
        self._cap = self.limits.max_sequences
        self._prepared: Version | None = None
        self._running: dict[str, _Row] = {}
        self._waiting: dict[str, _Row] = {}
        self._generated = self._prefilled = 0

    def prepare(self, version: Version, weights: Weights) -> None:
        """Remembers the version."""
        del weights
        self._prepared = version

    def switch(self, version: Version) -> list[Event]:
        """Serves it."""
        if self._prepared != version:
            raise errors.engine_state(f"version {version} was not prepared; send PREPARE first")
        self.version, self._prepared = version, None
        self.codec, self.max_sequence_tokens = self._codec, self.limits.max_context
        return []

    def abandon(self, version: Version) -> None:
        """Forgets it."""
        if self._prepared == version:
            self._prepared = None

    def submit(self, request: GenerationRequest) -> None:
        """Queues a request."""
        if self.version is None:
            raise errors.engine_state("the engine has no weights yet; load a version first")
        self._waiting[request.request_id] = _Row(request, [int(i) for i in request.prompt_ids])

    def abort(self, request_id: str, interruption: Interruption) -> list[Event]:
        """Ends a request with what it has."""
        row = self._running.get(request_id) or self._waiting.get(request_id)
        return [] if row is None else [self._end(row, interruption=interruption)]

    def forget(self, prefix_key: str) -> None:
        """Nothing is kept."""

    def set_concurrency(self, sequences: int) -> None:
        """Bounds running sequences."""
        self._cap = sequences

    def has_work(self) -> bool:
        """True if a sequence runs or could."""
        return bool(self._running) or bool(self._waiting and self._cap)

    def step(self) -> list[Event]:
        """One scripted token for each."""
        while self._waiting and len(self._running) < self._cap:
            name = next(iter(self._waiting))
            self._running[name] = self._waiting.pop(name)
            self._prefilled += len(self._running[name].ids)
        events = []
        for row in list(self._running.values()):
            token = self._script(row.ids)
            if token == EMPTY:
                events.append(self._end(row, finish=Finish.STOP))
                continue
            assert self.version is not None
            row.ids.append(token)
            row.versions.append((self.version.lineage, self.version.number))
            self._generated += 1
            finish = row.request.stop_ids.get(token)
            if finish is None and len(row.versions) >= row.request.max_tokens:
                finish = Finish.LENGTH
            if finish is not None:
                events.append(self._end(row, finish=finish))
            elif len(row.versions) - row.sent >= self.limits.chunk_tokens:
                events.append(Event(row.request.request_id, self._chunk(row)))
        return events

    def _chunk(self, row: _Row) -> Tokens | None:
        first, row.sent = row.sent, len(row.versions)
        if first == row.sent:
            return None
        start = len(row.request.prompt_ids)
        ids = np.array(row.ids[start + first :], np.int32)
        logprobs = np.full(len(ids), FAKE_LOGPROB, np.float32)
        return Tokens(ids, logprobs, np.array(row.versions[first:], np.int64).reshape(-1, 2))

    def _end(self, row: _Row, finish: Finish | None = None, interruption: Interruption | None = None) -> Event:
        name = row.request.request_id
        self._running.pop(name, None)
        self._waiting.pop(name, None)
        return Event(name, self._chunk(row), Outcome(len(row.versions), finish, interruption))

    def stats(self) -> EngineStats:
        """Load and counters."""
        used = sum(len(r.ids) for r in self._running.values())
        capacity = self.limits.slots * self.max_sequence_tokens
        return EngineStats(len(self._running), len(self._waiting), capacity, used, self._generated, self._prefilled)

    def release(self) -> list[Event]:
        """Ends everything."""
        rows = [*self._running.values(), *self._waiting.values()]
        events = [self._end(row, interruption=Interruption.LOST) for row in rows]
        self.version, self.codec, self._prepared, self.max_sequence_tokens = None, None, None, 0
        return events
