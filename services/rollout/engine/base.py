"""What a generation engine is, whatever runs inside: requests in, chunks of tokens with logprob and version out.

An engine serves one run at a time. It knows token ids only; text, tools and turns are the episode's. It is driven by a
`Core` in a thread of its own (engine/thread.py), so a core is plain synchronous code without locks.
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

MAX_CONTEXT = 1 << 20
"""Longest sequence any engine is asked for, tokens."""


class Finish(enum.IntEnum):
    """Why the model stopped; numbers of libra.v1.FinishReason. It has no value for interruptions on purpose."""

    STOP = 1
    TOOL_CALL = 2
    LENGTH = 3


class Interruption(enum.IntEnum):
    """Why a generation was broken off; numbers of libra.v1.Interruption."""

    PREEMPTED = 1
    LOST = 2
    DEADLINE = 3
    CANCELLED = 4


@dataclass(frozen=True, slots=True, order=True)
class Version:
    """A weight version of the engine's run."""

    lineage: int
    number: int


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn: temperature >= 0 (0 is greedy), top_p in (0, 1], top_k >= 0 (0 keeps all)."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


@dataclass(frozen=True, slots=True)
class DrawKey:
    """Makes token p's draw a pure function of these and p; first_position is p of the first token generated."""

    seed: int
    group: int
    sample: int
    sequence: int
    first_position: int


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Asks for up to max_tokens tokens after prompt_ids.

    stop_ids ends the generation after such a token, with the reason given. draw=None uses the engine's own randomness.
    Higher priority is admitted first. prefix_key names the sequence across turns, so that a later request with the same
    key finds its KV cache; empty keeps nothing.
    """

    request_id: str
    prompt_ids: Sequence[int] | npt.NDArray[np.int32]
    max_tokens: int
    sampling: Sampling = Sampling()
    stop_ids: Mapping[int, Finish] = field(default_factory=dict)
    draw: DrawKey | None = None
    priority: int = 0
    prefix_key: str = ""


@dataclass(frozen=True, slots=True)
class Tokens:
    """A chunk: ids int32 [n], logprobs float32 [n], versions int64 [n, 2] = (lineage, number)."""

    ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a generation: exactly one of finish, interruption and error is set."""

    total_tokens: int
    finish: Finish | None = None
    interruption: Interruption | None = None
    error: str = ""
    cached_tokens: int = 0
    wait_seconds: float = 0.0
    run_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Event:
    """What a step produced for one request: a chunk, the outcome, or both (the chunk first)."""

    request_id: str
    tokens: Tokens | None = None
    outcome: Outcome | None = None


@dataclass(frozen=True, slots=True)
class Weights:
    """The bytes of one version.

    `model` is the base model's folder or hub name: architecture, tokenizer and, where `shards` is empty, the weights.
    `shards` are safetensors files in loading order, already checked against their hashes.
    """

    model: str
    shards: Sequence[bytes] = ()


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Load and counters since the engine's start; seconds_per_token is since the last call of stats()."""

    running: int = 0
    waiting: int = 0
    kv_capacity_tokens: int = 0
    kv_used_tokens: int = 0
    generated_tokens: int = 0
    prefilled_tokens: int = 0
    engine_preemptions: int = 0
    paused_seconds: float = 0.0
    seconds_per_token: float = 0.0


class Codec(Protocol):
    """Text to ids and back. Text never becomes special tokens: those have ids of their own (`special`)."""

    def encode(self, text: str) -> list[int]:
        """Ids of plain text; a spelled-out special token is text like any other."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out."""
        ...

    def special(self, token: str) -> int:
        """Id of a special token; INVALID_FIELD if the tokenizer does not have it."""
        ...


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Bounds of an engine: sequences running at once, waiting ones, context length in tokens."""

    max_sequences: int = 64
    max_waiting: int = 1_024
    max_context: int = 4_096
    kv_slots: int = 0
    """Sequences whose KV cache is kept, those waiting for tools included; 0 = twice max_sequences."""
    prefill_tokens: int = 4_096
    """Prompt tokens taken into one step, so that a long prefill does not hold up running sequences for long."""
    chunk_tokens: int = 16
    """Tokens delivered at once while a generation runs."""

    @property
    def slots(self) -> int:
        """Sequences whose KV cache is kept."""
        return max(self.max_sequences, self.kv_slots or 2 * self.max_sequences)


class Core(Protocol):
    """The engine proper, called from one thread only."""

    build: str
    dtype: str
    positional_seed: bool
    version: Version | None
    max_sequence_tokens: int
    codec: Codec | None

    def prepare(self, version: Version, weights: Weights) -> None:
        """Reads a version beside the running one. The one method that may run in another thread meanwhile."""
        ...

    def switch(self, version: Version) -> list[Event]:
        """Serves what was prepared from the next token on. Running requests go on, their cache computed anew."""
        ...

    def abandon(self, version: Version) -> None:
        """Drops what was prepared under this version; no effect if nothing was."""
        ...

    def submit(self, request: GenerationRequest) -> None:
        """Queues a request. INVALID_FIELD, CAPACITY or ENGINE_STATE if it cannot be taken."""
        ...

    def abort(self, request_id: str, interruption: Interruption) -> list[Event]:
        """Ends a request, queued or running, with the tokens it has; [] if it is not there (any more)."""
        ...

    def forget(self, prefix_key: str) -> None:
        """Drops the cache kept for a sequence."""
        ...

    def set_concurrency(self, sequences: int) -> None:
        """Bounds the sequences running at once from now on."""
        ...

    def has_work(self) -> bool:
        """True if a step would do something."""
        ...

    def step(self) -> list[Event]:
        """Generates one token for each running sequence (prefilling newcomers) and returns what is to be delivered."""
        ...

    def stats(self) -> EngineStats:
        """Load and counters."""
        ...

    def release(self) -> list[Event]:
        """Ends everything (LOST) and frees model and cache."""
        ...


def model_name(model: str) -> str:
    """A model's name for logs: the last part of its path."""
    return Path(model).name
