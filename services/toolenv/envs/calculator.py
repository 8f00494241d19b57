"""The calculator environment: questions whose answers are numbers, and one tool that evaluates an expression.

Task: {"question": text, "answer": text or number, "max_ops": operators accepted in one call (optional),
"latency": {"p50_ms", "p99_ms"} (optional: each call takes a lognormal time with these quantiles, drawn from the
session's seed and the call id)}. Further keys are ignored.
"""

import asyncio
import math
import random
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from services.toolenv.envs import arithmetic
from services.toolenv.envs.base import (
    CallResult,
    Episode,
    Kind,
    Outcome,
    ScoreResult,
    TaskError,
    TimeoutMeaning,
    ToolSpec,
)

TOOL = "calculate"
MAX_QUESTION_BYTES = 64 << 10
MAX_LATENCY_MS = 600_000.0

Sleep = Callable[[float], Awaitable[None]]

_NORMAL_P99 = 2.3263478740408408
_NUMBER = re.compile(r"[+-]?\d{1,40}(\.\d{1,40})?")


@dataclass(frozen=True, slots=True)
class Latency:
    """A lognormal time by its median and 99th percentile: exp(N(ln p50, (ln p99 - ln p50) / 2.326))."""

    p50_s: float
    p99_s: float

    def draw(self, seed: str) -> float:
        """Seconds; the same seed gives the same time."""
        sigma = math.log(self.p99_s / self.p50_s) / _NORMAL_P99
        return random.Random(seed).lognormvariate(math.log(self.p50_s), sigma)  # noqa: S311 - simulated waiting


@dataclass(frozen=True, slots=True)
class CalculatorTask:
    """A parsed task."""

    question: str
    answer: str
    max_ops: int
    latency: Latency | None


class Calculator:
    """The environment; `sleep` is a parameter so that tests need not wait."""

    name = "calculator"
    version = "1"

    def __init__(self, *, timeout_s: float = 30.0, instructions: str = "", sleep: Sleep = asyncio.sleep) -> None:
        self._instructions = instructions
        self._sleep = sleep
        self.tools: tuple[ToolSpec, ...] = (
            ToolSpec(
                name=TOOL,
                description="Evaluates an arithmetic expression of numbers, + - * / and parentheses, exactly.",
                schema={
                    "type": "object",
                    "properties": {"expression": {"type": "string", "maxLength": arithmetic.MAX_CHARACTERS}},
                    "required": ["expression"],
                    "additionalProperties": False,
                },
                kind=Kind.PURE,
                timeout_s=timeout_s,
                timeout_meaning=TimeoutMeaning.NO_EFFECT,
            ),
        )

    async def open(self, task: Mapping[str, Any], seed: int) -> Episode:
        return CalculatorEpisode(parse_task(task), seed, self._instructions, self._sleep)


class CalculatorEpisode:
    """One question; it keeps no state between calls."""

    def __init__(self, task: CalculatorTask, seed: int, instructions: str, sleep: Sleep) -> None:
        self.instructions = instructions
        self.observation = task.question
        self._task = task
        self._seed = seed
        self._sleep = sleep

    async def call(self, call_id: str, tool: str, arguments: Mapping[str, Any], timeout_s: float) -> CallResult:
        assert tool == TOOL
        latency = self._task.latency.draw(f"{self._seed}/{call_id}") if self._task.latency else 0.0
        if latency >= timeout_s:
            await self._sleep(timeout_s)
            return CallResult(Outcome.TIMEOUT, "timeout", "timeout")
        if latency:
            await self._sleep(latency)
        expression = arguments.get("expression")
        if set(arguments) != {"expression"} or not isinstance(expression, str):
            return CallResult(Outcome.TOOL_ERROR, 'error: expected {"expression": text}', "bad_arguments")
        try:
            result = arithmetic.evaluate(expression, self._task.max_ops)
        except arithmetic.ExpressionError as error:
            return CallResult(Outcome.TOOL_ERROR, f"error: {error}", "bad_expression")
        return CallResult(Outcome.OK, result.text, "number")

    async def score(self, final_answer: str, timeout_s: float) -> ScoreResult:  # noqa: ARG002 - part of the interface
        right = same_answer(final_answer, self._task.answer)
        return ScoreResult(Outcome.OK, float(right), {"answered": float(bool(final_answer.strip()))})

    async def close(self) -> None:
        return


def same_answer(given: str, expected: str) -> bool:
    """Equal as text without surrounding blanks, or both plain decimal numbers of equal value."""
    given, expected = given.strip(), expected.strip()
    if given == expected:
        return bool(expected)
    left, right = (_NUMBER.fullmatch(text) for text in (given, expected))
    return left is not None and right is not None and Fraction(given) == Fraction(expected)


def parse_task(task: Mapping[str, Any]) -> CalculatorTask:
    """TaskError names the key that is wrong."""
    question, answer, max_ops = task.get("question"), task.get("answer"), task.get("max_ops", arithmetic.MAX_OPERATORS)
    if not isinstance(question, str) or not question or len(question.encode()) > MAX_QUESTION_BYTES:
        raise TaskError(f"question: expected a text of 1 to {MAX_QUESTION_BYTES} bytes, found {_short(question)}")
    if isinstance(answer, bool) or not isinstance(answer, str | int | float) or not str(answer).strip():
        raise TaskError(f"answer: expected a text or a number, found {_short(answer)}")
    if isinstance(max_ops, bool) or not isinstance(max_ops, int) or not 0 <= max_ops <= arithmetic.MAX_OPERATORS:
        raise TaskError(f"max_ops: expected an integer from 0 to {arithmetic.MAX_OPERATORS}, found {_short(max_ops)}")
    return CalculatorTask(question, str(answer), max_ops, _latency(task.get("latency")))


def _latency(value: Any) -> Latency | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise TaskError(f'latency: expected {{"p50_ms": number, "p99_ms": number}}, found {_short(value)}')
    p50, p99 = value.get("p50_ms"), value.get("p99_ms")
    numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in (p50, p99))
    if not numbers or not 0 < p50 <= p99 <= MAX_LATENCY_MS:  # type: ignore[operator]
        raise TaskError(
            f"latency: expected 0 < p50_ms <= p99_ms <= {MAX_LATENCY_MS:.0f}, found p50_ms {_short(p50)}, "
            f"p99_ms {_short(p99)}"
        )
    return Latency(float(p50) / 1000, float(p99) / 1000)  # type: ignore[arg-type]


def _short(value: Any) -> str:
    return "nothing" if value is None else repr(value)[:60]
