"""What an environment of this service is: plain Python, no protobuf, no gRPC. api.py turns it into the contract."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


class Kind(enum.Enum):
    """May a call be repeated? See libra.v1.ToolKind."""

    PURE = "PURE"
    SESSION = "SESSION"
    EXTERNAL = "EXTERNAL"


class TimeoutMeaning(enum.Enum):
    """What is known after a timeout? See libra.v1.TimeoutMeaning."""

    NO_EFFECT = "NO_EFFECT"
    EFFECT_UNKNOWN = "EFFECT_UNKNOWN"


class Outcome(enum.Enum):
    """How a call or a score ended. See libra.v1.ToolOutcome."""

    OK = "OK"
    TOOL_ERROR = "TOOL_ERROR"
    TIMEOUT = "TIMEOUT"
    INFRA_ERROR = "INFRA_ERROR"


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """One tool as the model sees it; `schema` is a JSON Schema of its arguments, an object schema."""

    name: str
    description: str
    schema: Mapping[str, Any]
    kind: Kind
    timeout_s: float
    timeout_meaning: TimeoutMeaning


@dataclass(frozen=True, slots=True)
class CallResult:
    """A finished call. `output` is what the model reads; `payload_class` a short class of it, for length prediction."""

    outcome: Outcome
    output: str
    payload_class: str = ""
    truncated: bool = False


@dataclass(frozen=True, slots=True)
class ScoreResult:
    """A reward, or an outcome other than OK and none."""

    outcome: Outcome
    reward: float | None = None
    components: Mapping[str, float] = field(default_factory=dict)


class TaskError(Exception):
    """The task is not one of this environment's; the message says which key, what was found, what is expected."""


class InfraError(Exception):
    """The environment broke; becomes INFRA_ERROR, which is nobody's reward."""


class Episode(Protocol):
    """The state of one open session."""

    instructions: str
    """Text for the system message."""
    observation: str
    """Text for the first user message."""

    async def call(self, call_id: str, tool: str, arguments: Mapping[str, Any], timeout_s: float) -> CallResult:
        """Runs an offered tool, one call at a time; ends within timeout_s, with TIMEOUT if it must.

        Cancellation kills whatever runs. InfraError, or any unexpected exception, becomes INFRA_ERROR.
        """
        ...

    async def score(self, final_answer: str, timeout_s: float) -> ScoreResult:
        """The reward of the episode as it stands."""
        ...

    async def close(self) -> None:
        """Frees everything; called once."""
        ...


class Environment(Protocol):
    """One environment type: what Describe says, and how an episode begins."""

    name: str
    version: str
    tools: tuple[ToolSpec, ...]

    async def open(self, task: Mapping[str, Any], seed: int) -> Episode:
        """Begins an episode. TaskError if the task does not fit; InfraError if the environment broke."""
        ...
