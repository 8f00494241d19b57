"""How text and token ids map to prompts, tool calls and final answers. One class a dialect; models are trained to one.

Nothing is ever re-tokenised: a prompt is encoded once, a tool's output once, and what the model wrote stays its ids.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.common import errors
from services.rollout.engine.base import Codec, Finish


@dataclass(frozen=True, slots=True)
class ToolCall:
    """The model asks for a tool. `arguments_json` is what it wrote, made JSON; the environment judges it."""

    tool: str
    arguments_json: str


@dataclass(frozen=True, slots=True)
class Final:
    """The model is done; `answer` is empty if it gave none."""

    answer: str


class Dialect(Protocol):
    """A mapping between text and what the model reads and writes."""

    name: str

    @property
    def stop_ids(self) -> Mapping[int, Finish]:
        """Tokens that end a generation."""
        ...

    def prompt_ids(self, instructions: str, observation: str) -> list[int]:
        """The first prompt, from the environment's texts."""
        ...

    def parse(self, ids: Sequence[int], finish: Finish) -> ToolCall | Final:
        """What a finished turn says; `ids` are all tokens of the turn. Never raises: nonsense is an empty answer."""
        ...

    def observation_ids(self, output: str) -> list[int]:
        """What the model reads after a tool call."""
        ...

    def next_prompt(self, ids: Sequence[int], output: str) -> list[int]:
        """The next turn's whole prompt: `ids` and then the tool's output. One that rewrites `ids` makes a fork."""
        ...


class LibraTags:
    """`<bos>prompt`, then `<call>3+14</call>` answered by `<out>17</out>`, or `<ans>17</ans><eos>`."""

    name = "libra-tags"
    TOOL = "calculate"

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        special = codec.special
        self._bos, self._eos = special("<bos>"), special("<eos>")
        self._call, self._end_call = special("<call>"), special("</call>")
        self._out, self._end_out = special("<out>"), special("</out>")
        self._ans, self._end_ans = special("<ans>"), special("</ans>")
        self.stop_ids: Mapping[int, Finish] = {self._end_call: Finish.TOOL_CALL, self._eos: Finish.STOP}

    def prompt_ids(self, instructions: str, observation: str) -> list[int]:
        """<bos>, instructions, observation."""
        return [self._bos, *self._codec.encode(instructions), *self._codec.encode(observation)]

    def parse(self, ids: Sequence[int], finish: Finish) -> ToolCall | Final:
        """A call without its opening tag has no expression, which the tool refuses; so the model learns of it."""
        if finish == Finish.TOOL_CALL:
            inside = _between(ids, self._call, self._end_call)
            expression = self._codec.decode(inside) if inside is not None else ""
            return ToolCall(self.TOOL, json.dumps({"expression": expression}))
        if finish == Finish.STOP:
            inside = _between(ids, self._ans, self._end_ans)
            return Final(self._codec.decode(inside) if inside is not None else "")
        return Final("")  # cut by a limit: no answer was given

    def observation_ids(self, output: str) -> list[int]:
        """<out>, the output, </out>."""
        return [self._out, *self._codec.encode(output), self._end_out]

    def next_prompt(self, ids: Sequence[int], output: str) -> list[int]:
        """Exactly the ids so far, then the observation."""
        return [*ids, *self.observation_ids(output)]


def _between(ids: Sequence[int], opening: int, closing: int) -> list[int] | None:
    """The ids between the last `closing` and the `opening` before it; None if either is missing."""
    row = [int(i) for i in ids]
    if closing not in row:
        return None
    end = len(row) - 1 - row[::-1].index(closing)
    if opening not in row[:end]:
        return None
    start = end - 1 - row[:end][::-1].index(opening)
    return row[start + 1 : end]


DIALECTS = {LibraTags.name: LibraTags}


def open_dialect(name: str, codec: Codec) -> Dialect:
    """The dialect of this name for a model's tokenizer; INVALID_FIELD if either does not fit."""
    if name not in DIALECTS:
        raise errors.invalid_field(f"dialect {name!r} is unknown; known: {', '.join(DIALECTS)}")
    return DIALECTS[name](codec)
