"""The calculator environment without a server."""

import math
import statistics

import pytest

from services.toolenv.envs.base import Outcome, TaskError
from services.toolenv.envs.calculator import TOOL, Calculator, Latency, parse_task, same_answer

TASK = {"question": "3+14-2=?", "answer": "15", "max_ops": 1, "operations": 2}


class Slept:
    """Takes the place of asyncio.sleep and notes what was asked."""

    def __init__(self):
        self.seconds = []

    async def __call__(self, seconds):
        self.seconds.append(seconds)


@pytest.fixture
def slept():
    return Slept()


async def open_task(slept, task=TASK, seed=1):
    return await Calculator(sleep=slept).open(task, seed)


async def test_calls(slept):
    episode = await open_task(slept)
    assert episode.observation == "3+14-2=?"
    assert episode.instructions == ""
    result = await episode.call("1-0", TOOL, {"expression": "3+14"}, 5)
    assert (result.outcome, result.output, result.payload_class) == (Outcome.OK, "17", "number")
    assert slept.seconds == []


@pytest.mark.parametrize(
    "arguments", [{}, {"expression": 3}, {"expression": None}, {"expression": ["1"]}, {"expr": "1"},
                  {"expression": "1", "more": 2}],
)  # fmt: skip
async def test_wrong_arguments_are_the_models_error(slept, arguments):
    result = await (await open_task(slept)).call("1-0", TOOL, arguments, 5)
    assert (result.outcome, result.payload_class) == (Outcome.TOOL_ERROR, "bad_arguments")


@pytest.mark.parametrize("expression", ["3+14-2", "1/0", "import os", "9" * 5000, "(" * 1000])
async def test_wrong_expressions_are_the_models_error(slept, expression):
    result = await (await open_task(slept)).call("1-0", TOOL, {"expression": expression}, 5)
    assert (result.outcome, result.payload_class) == (Outcome.TOOL_ERROR, "bad_expression")
    assert result.output.startswith("error: ")
    assert len(result.output) < 80


async def test_latency_follows_the_seed_and_the_call(slept):
    task = TASK | {"latency": {"p50_ms": 10, "p99_ms": 400}}
    for seed, call_id in [(1, "1-0"), (1, "1-0"), (1, "1-1"), (2, "1-0")]:
        await (await open_task(slept, task, seed)).call(call_id, TOOL, {"expression": "1+1"}, 1e9)
    first, again, other_call, other_seed = slept.seconds
    assert first == again
    assert len({first, other_call, other_seed}) == 3


async def test_latency_beyond_the_limit_is_a_timeout(slept):
    task = TASK | {"latency": {"p50_ms": 5000, "p99_ms": 5000}}
    result = await (await open_task(slept, task)).call("1-0", TOOL, {"expression": "1+1"}, 2.0)
    assert (result.outcome, result.output) == (Outcome.TIMEOUT, "timeout")
    assert slept.seconds == [2.0]


def test_latency_has_the_quantiles_asked_for():
    times = [Latency(0.010, 0.400).draw(f"1/{n}") for n in range(20_000)]
    quantiles = statistics.quantiles(times, n=100)
    assert math.isclose(quantiles[49], 0.010, rel_tol=0.05)
    assert math.isclose(quantiles[98], 0.400, rel_tol=0.15)


@pytest.mark.parametrize(
    ("answer", "reward"),
    [("15", 1.0), (" 15\n", 1.0), ("15.0", 1.0), ("+15", 1.0), ("", 0.0), ("16", 0.0), ("15 ", 1.0), ("3+12", 0.0),
     ("1" * 100_000, 0.0), ("15x", 0.0), ("nan", 0.0)],
)  # fmt: skip
async def test_score(slept, answer, reward):
    score = await (await open_task(slept)).score(answer, 5)
    assert (score.outcome, score.reward) == (Outcome.OK, reward)


def test_texts_may_be_answers_too():
    assert same_answer("Paris", "Paris")
    assert not same_answer("", "")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"question": 3}, "question"), ({"question": ""}, "question"), ({"question": "x" * 70_000}, "question"),
        ({"answer": None}, "answer"), ({"answer": True}, "answer"), ({"answer": []}, "answer"),
        ({"answer": ""}, "answer"),
        ({"max_ops": -1}, "max_ops"), ({"max_ops": "1"}, "max_ops"), ({"max_ops": True}, "max_ops"),
        ({"latency": 3}, "latency"), ({"latency": {"p50_ms": 10}}, "latency"),
        ({"latency": {"p50_ms": 0, "p99_ms": 1}}, "latency"), ({"latency": {"p50_ms": 5, "p99_ms": 1}}, "latency"),
        ({"latency": {"p50_ms": 1, "p99_ms": 1e12}}, "latency"),
        ({"latency": {"p50_ms": float("nan"), "p99_ms": 1}}, "latency"),
    ],
)  # fmt: skip
def test_a_wrong_task_names_its_key(changes, named):
    with pytest.raises(TaskError, match=f"^{named}: expected"):
        parse_task(TASK | changes)


def test_only_question_and_answer_are_required():
    task = parse_task({"question": "1+1", "answer": 2, "anything": {}})
    assert (task.answer, task.latency) == ("2", None)
