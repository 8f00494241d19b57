"""The demo's task files."""

import statistics

import pytest

from services.ops import workload
from services.toolenv.envs import arithmetic
from services.toolenv.envs.calculator import parse_task

TOKENS_PER_CALL = len("<999+99>") + len("<999>")
"""A tag is one token, here one character."""
POSITIONS = 512


@pytest.mark.parametrize("drift", [False, True])
def test_tasks_are_right_and_accepted_by_the_environment(drift):
    for task in workload.training_tasks(3, 400, drift) + workload.heldout_tasks(3):
        parse_task(task)
        expression = task["question"].removesuffix("=?")
        value = arithmetic.evaluate(expression)
        assert (value.text, value.operators) == (task["answer"], task["operations"])
        assert 1 <= task["operations"] <= workload.LONGEST


def test_every_step_on_the_way_needs_no_sign_and_the_longest_fits_the_model():
    for task in workload.training_tasks(0, 2_000, drift=True):
        tokens = 1 + len(task["question"]) + task["operations"] * TOKENS_PER_CALL + len("<999>.")
        assert tokens <= POSITIONS
        assert not task["answer"].startswith("-")


def test_the_same_seed_gives_the_same_tasks():
    assert workload.training_tasks(1, 50, drift=True) == workload.training_tasks(1, 50, drift=True)
    assert workload.training_tasks(1, 50, drift=True) != workload.training_tasks(2, 50, drift=True)
    assert workload.heldout_tasks(1) == workload.heldout_tasks(1)
    assert workload.heldout_tasks(1, 10) == workload.heldout_tasks(1)[:10]


def mean(tasks, key):
    return statistics.mean(task[key] for task in tasks)


def test_drift_makes_episodes_longer_and_slower():
    tasks = workload.training_tasks(0, 1_000, drift=True)
    first, last = tasks[:200], tasks[-200:]
    assert mean(first, "operations") < 3.5
    assert mean(last, "operations") > 1.8 * mean(first, "operations")
    assert not any(task["operations"] >= workload.TAIL[0] for task in first[:50])
    assert sum(task["operations"] >= workload.TAIL[0] for task in last) >= 5
    assert last[-1]["latency"]["p99_ms"] > 3 * first[0]["latency"]["p99_ms"]
    quick = {task["latency"]["p50_ms"] for task in last if task["operations"] >= workload.TAIL[0]}
    assert quick == {workload.TAIL_LATENCY * workload.LATENCY_END_MS[0]}, "long episodes make quick calls"
    assert min(task["operations"] for task in last) == 1, "some short ones stay, or the policy forgets them"


def test_without_drift_the_mix_stays():
    tasks = workload.training_tasks(0, 2_000, drift=False)
    assert abs(mean(tasks[:1_000], "operations") - mean(tasks[1_000:], "operations")) < 0.4
    for few, many in ((0, workload.TAIL[0] - 1), workload.TAIL):
        assert len({str(task["latency"]) for task in tasks if few <= task["operations"] <= many}) == 1


def test_held_out_tasks_cover_all_lengths_evenly():
    counts = [sum(t["operations"] == n for t in workload.heldout_tasks(5, 256)) for n in range(1, 7)]
    assert max(counts) - min(counts) <= 1
    assert "latency" not in workload.heldout_tasks(5)[0]


def test_operands_do_not_repeat_and_their_number_is_bounded():
    import random

    terms, _ = workload.expression(random.Random(0), workload.LONGEST)
    assert len({term.lstrip("+-") for term in terms}) == workload.LONGEST + 1
    with pytest.raises(ValueError, match="operations must be"):
        workload.expression(random.Random(0), 90)
