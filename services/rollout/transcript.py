"""The tokens of one attempt: its sequences, what is registered of them, and where its turns stand.

What a segment holds. The tokens of a sequence are cut into segments in order, without gap or overlap, from its fork
position (0 for a root). A segment is cut when a part of a turn ends, finished or interrupted, and covers everything
not yet registered: first what the model read since the last cut (prompt or tool output; loss mask 0, logprob 0,
version -1), then what it generated in this part (loss mask 1). So the first segment begins with the whole prompt, each
tool output lies at the head of the segment of the turn that read it, and joining an attempt's segments gives back
exactly the ids that the engine saw. A part without generated tokens cuts no segment: what was read stays unregistered
and is had again from the environment, which stores results by call id.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from services.common import errors, segment, wire
from services.rollout.engine.base import Tokens

UNVERSIONED = -1


@dataclass(slots=True)
class Line:
    """One sequence: all ids (the parent's first fork_position included), the columns of its unregistered tail."""

    index: int
    ids: list[int] = field(default_factory=list)
    parent: int | None = None
    fork_position: int = 0
    fork_reason: int = 0
    registered: int = 0
    """Position up to which segments are registered or handed in."""
    tail: list[Tokens | int] = field(default_factory=list)
    """Since then: chunks of generated tokens, and counts of tokens that were only read."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A segment about to be written."""

    sequence: int
    first_position: int
    columns: dict[str, npt.NDArray[np.generic]]
    generated: int
    spans: list[wire.VersionSpan]

    @property
    def tokens(self) -> int:
        """Length."""
        return len(self.columns["ids"])


class Transcript:
    """Single writer: its episode."""

    def __init__(self) -> None:
        self.lines = [Line(0)]
        self.turns: list[wire.Turn] = []
        """Parts of turns that are registered or handed in, in order."""

    # ---- tokens

    @property
    def line(self) -> Line:
        """The sequence that grows."""
        return self.lines[-1]

    @property
    def length(self) -> int:
        """Tokens of the present sequence."""
        return len(self.line.ids)

    def read(self, ids: Sequence[int]) -> None:
        """Adds tokens that the model did not generate."""
        if ids:
            self.line.ids.extend(ids)
            self.line.tail.append(len(ids))

    def wrote(self, tokens: Tokens) -> None:
        """Adds generated tokens."""
        self.line.ids.extend(tokens.ids.tolist())
        self.line.tail.append(tokens)

    def extend_to(self, prompt: Sequence[int], reason: int) -> bool:
        """Makes `prompt` the present ids. True if that needed a fork, since it does not begin with the ids so far."""
        line = self.line
        if list(prompt[: len(line.ids)]) == line.ids:
            self.read(prompt[len(line.ids) :])
            return False
        shared = next(i for i, (a, b) in enumerate(zip([*prompt, -1], [*line.ids, -2], strict=False)) if a != b)
        # only registered tokens can be shared: the rest would never be written
        shared = min(shared, line.registered)
        fork = Line(line.index + 1, line.ids[:shared], line.index, shared, reason, registered=shared)
        self.lines.append(fork)
        self.read(prompt[shared:])
        return True

    def cut(self) -> Cut | None:
        """What is not registered yet, as a segment; None if no generated token is among it. Counts as registered."""
        line = self.line
        if not any(isinstance(piece, Tokens) for piece in line.tail):
            return None
        first, count = line.registered, len(line.ids) - line.registered
        ids = np.array(line.ids[first:], np.int32)
        mask = np.zeros(count, np.uint8)
        logprobs = np.zeros(count, np.float32)
        versions = np.full((count, 2), UNVERSIONED, np.int64)
        at = 0
        for piece in line.tail:
            if isinstance(piece, int):
                at += piece
                continue
            end = at + len(piece)
            mask[at:end], logprobs[at:end], versions[at:end] = 1, piece.logprobs, piece.versions
            at = end
        line.tail.clear()
        line.registered = first + count
        columns: dict[str, npt.NDArray[np.generic]] = {
            "ids": ids, "loss_mask": mask, "logprob": logprobs, "weight_version": versions,
        }  # fmt: skip
        return Cut(line.index, first, columns, int(mask.sum()), version_spans(versions, mask, first))

    # ---- turns

    @property
    def last_turn(self) -> int:
        """Index of the newest turn; -1 if none began."""
        return self.turns[-1].index if self.turns else -1

    @property
    def finish(self) -> int:
        """Why the newest turn stopped (wire.FinishReason); 0 while it is open or none began."""
        return next((t.finish for t in reversed(self._parts(self.last_turn)) if t.finish), 0)

    @property
    def over(self) -> bool:
        """True if no further turn follows: the model is done or was cut."""
        finish = self.finish
        cut = any(t.truncated for t in self._parts(self.last_turn))
        return cut or finish not in (0, wire.FINISH_REASON_TOOL_CALL)

    @property
    def calls(self) -> int:
        """Tool calls begun: turns that ended with one."""
        return len({t.index for t in self.turns if t.finish == wire.FINISH_REASON_TOOL_CALL})

    @property
    def recorded(self) -> bool:
        """True if the newest turn's tool call is registered with its result."""
        return any(t.tool_calls for t in self._parts(self.last_turn))

    @property
    def generated(self) -> int:
        """Generated tokens in registered parts."""
        return sum(t.generated_tokens for t in self.turns)

    def next_part(self) -> tuple[int, int]:
        """(turn, part) under which the present turn is reported next."""
        if not self.turns:
            return 0, 0
        if self.finish:
            return self.last_turn + 1, 0
        return self.last_turn, self.turns[-1].part + 1

    def turn_ids(self, index: int) -> list[int]:
        """All tokens generated in a turn, over its parts."""
        return [
            token
            for part in self._parts(index)
            for token in self.lines[part.sequence].ids[
                part.first_position : part.first_position + part.generated_tokens
            ]
        ]

    def turn_generated(self, index: int) -> int:
        """Number of tokens generated in a turn's registered parts."""
        return sum(part.generated_tokens for part in self._parts(index))

    def _parts(self, index: int) -> list[wire.Turn]:
        return [t for t in self.turns if t.index == index]


def version_spans(versions: npt.NDArray[np.int64], mask: npt.NDArray[np.uint8], first: int) -> list[wire.VersionSpan]:
    """Runs of equal version among generated tokens; what was read in between ends a run."""
    if not len(mask):
        return []
    change = np.flatnonzero((versions[1:] != versions[:-1]).any(axis=1)) + 1
    spans = []
    for start, end in zip([0, *change.tolist()], [*change.tolist(), len(mask)], strict=True):
        if mask[start]:
            lineage, number = (int(x) for x in versions[start])
            spans.append(
                wire.VersionSpan(
                    version=wire.VersionRef(lineage=lineage, number=number),
                    first_position=first + start, tokens=end - start, trainable_tokens=int(mask[start:end].sum()),
                )
            )  # fmt: skip
    return spans


def rebuild(
    sequences: Sequence[wire.Sequence], turns: Sequence[wire.Turn], fetch: Callable[[wire.BlobRef], bytes]
) -> Transcript:
    """The transcript of a lease that goes on. BLOB_MISMATCH if a segment is gone, differs or leaves a gap."""
    transcript = Transcript()
    transcript.turns = sorted(turns, key=lambda t: (t.index, t.part))
    if not sequences:
        return transcript
    transcript.lines = []
    for number, sequence in enumerate(sorted(sequences, key=lambda s: s.index)):
        parent = sequence.parent if sequence.HasField("parent") else None
        if sequence.index != number or (parent is not None and parent >= number):
            raise errors.blob_mismatch(f"sequence {sequence.index}", f"expected sequence {number} with an older parent")
        ids = transcript.lines[parent].ids[: sequence.fork_position] if parent is not None else []
        line = Line(sequence.index, ids, parent, sequence.fork_position, sequence.fork_reason)
        for part in sorted(sequence.segments, key=lambda s: s.first_position):
            if part.first_position != len(line.ids):
                raise errors.blob_mismatch(
                    part.blob.uri, f"begins at position {part.first_position}; expected {len(line.ids)}"
                )
            column = segment.decode(fetch(part.blob))["ids"]
            if len(column) != part.tokens:
                raise errors.blob_mismatch(part.blob.uri, f"holds {len(column)} tokens; expected {part.tokens}")
            line.ids.extend(column.tolist())
        line.registered = len(line.ids)
        transcript.lines.append(line)
    return transcript
