"""One engine as a fluid, against closed forms and against a loop over tokens."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.simulator.layout import ClusterSpec, Failure, Layout
from services.simulator.policies.base import Policy
from tests.support.sim_times import ConstantTimes, LinearTimes
from tests.support.sim_worlds import episode, rollout


def one_engine(times, episodes, **changes):
    spec = ClusterSpec(times, None, accelerators=1, node_size=1, **changes)
    return rollout(spec, episodes, Policy(Layout((1,), 0)))


@given(st.integers(1, 40), st.integers(1, 5_000), st.floats(0.001, 0.2))
def test_at_a_constant_rate_equal_sequences_end_after_their_tokens(count, tokens, step):
    cluster, result = one_engine(ConstantTimes(step=step), [episode(f"e{i}", tokens) for i in range(count)])
    assert result.steps[-1].ended_at == pytest.approx(tokens * step)
    assert cluster.engines[0].generated == count * tokens
    assert result.since(0).tokens_per_s == pytest.approx(count / step)


def test_a_linear_step_time_is_integrated_exactly():
    # sum over k < T of a + b n + c n (P + k), midpoints: T (a + b n) + c n (P T + T^2 / 2)
    times = LinearTimes(prefill=0.0)
    n, tokens, prompt = 12, 4_000, 700
    _, result = one_engine(times, [episode(f"e{i}", tokens, prompt=prompt) for i in range(n)])
    assert times.prefill_s(1, prompt, 0) < 1e-2
    closed = tokens * (times.weights + times.sequence * n) + times.context * n * (prompt * tokens + tokens**2 / 2)
    assert result.steps[-1].ended_at == pytest.approx(closed + n * times.prefill_s(1, prompt, 0), rel=1e-6)


def test_the_cap_makes_rounds():
    _, result = one_engine(ConstantTimes(step=0.01), [episode(f"e{i}", 100) for i in range(7)], max_running=3)
    assert result.steps[-1].ended_at == pytest.approx(3 * 100 * 0.01)


def test_prefill_stalls_all_and_what_is_cached_is_not_computed_again():
    times = ConstantTimes(step=0.01, prefill=0.001)
    _, result = one_engine(times, [episode("a", 100, 100, prompt=500, latency=2.0, observation=40)])
    assert result.steps[-1].ended_at == pytest.approx(0.5 + 1.0 + 2.0 + 0.04 + 1.0)
    _, result = one_engine(times, [episode("a", 100, prompt=500), episode("b", 100, prompt=300)])
    assert result.steps[-1].ended_at == pytest.approx(0.8 + 1.0)


def test_siblings_share_the_prefill_of_their_prompt():
    times = ConstantTimes(step=0.01, prefill=0.001)
    members = [episode(f"a{i}", 100, prompt=500, group="a") for i in range(4)]
    _, result = one_engine(times, members)
    assert result.steps[-1].ended_at == pytest.approx(0.5 + 1.0)


def test_a_context_evicted_during_a_tool_call_is_computed_again():
    times = ConstantTimes(step=0.01, prefill=0.001, kv=1_000)
    first = episode("a", 100, 100, prompt=400, latency=5.0, observation=0)
    alone, _ = one_engine(times, [first])
    both, _ = one_engine(times, [first, episode("b", 10, 600, prompt=200, latency=0.5, observation=0)])
    assert alone.engines[0].prefilled == 400
    # at its call a holds 500 of 1,000; b grows to 810 and evicts it; a comes back with 500 to compute
    assert both.engines[0].prefilled == 400 + 200 + 500


def test_running_contexts_that_outgrow_the_cache_stop_the_youngest():
    times = ConstantTimes(step=0.01, kv=1_000)
    cluster, result = one_engine(times, [episode("old", 600), episode("young", 600)])
    engine = cluster.engines[0]
    assert result.preemptions == 1
    assert engine.generated == 1_200, "what was generated is kept"
    # together until 2 (10 + k) = 999, then the old one alone, then the young one
    assert result.steps[-1].ended_at == pytest.approx((600 + 600 - 489.5) * 0.01, abs=0.03)


def test_a_slow_engine_takes_its_factor_and_a_hung_one_does_nothing_more():
    work = [episode("a", 1_000)]
    slow = (Failure(0, "slow", 5.0, factor=3.0),)
    _, result = one_engine(ConstantTimes(step=0.01), work, failures=slow)
    assert result.steps[-1].ended_at == pytest.approx(5.0 + 5.0 * 3)
    spec = ClusterSpec(
        ConstantTimes(step=0.01), None, accelerators=2, node_size=2, failures=(Failure(0, "hang", 5.0),), detect_s=20.0
    )
    cluster, result = rollout(spec, work, Policy(Layout((1, 1), 0)))
    assert result.steps[-1].ended_at == pytest.approx(25.0 + 10.0), "the turn begins again elsewhere"
    assert result.wasted == 500
    assert sum(e.generated for e in cluster.engines) == 1_500
    assert cluster.engines[0].busy_s == pytest.approx(5.0)


def token_loop(times, contexts, tokens, arrivals):
    """A loop over decoding steps: the end of each sequence; prefill stalls all; no limits."""
    now, running, ends, queue = 0.0, {}, {}, sorted(range(len(tokens)), key=lambda i: (arrivals[i], i))
    while queue or running:
        if not running and queue:
            now = max(now, arrivals[queue[0]])
        while queue and arrivals[queue[0]] <= now + 1e-12:
            i = queue.pop(0)
            now += times.prefill_s(1, contexts[i], 0)
            running[i] = [contexts[i], tokens[i]]
        now += times.decode_s(1, len(running), sum(c for c, _ in running.values()))
        for i in list(running):
            running[i][0] += 1
            running[i][1] -= 1
            if not running[i][1]:
                ends[i] = now
                del running[i]
    return [ends[i] for i in range(len(tokens))]


@given(st.integers(0, 1_000_000))
def test_the_fluid_agrees_with_a_loop_over_tokens(seed):
    rng = random.Random(seed)
    times = LinearTimes(context=rng.choice([1e-8, 1e-6, 1e-5]))
    count = rng.randint(1, 8)
    tokens = [rng.randint(200, 3_000) for _ in range(count)]
    prompts = [rng.randint(10, 3_000) for _ in range(count)]
    # one turn of no tokens and a tool call bring each to the engine at its time
    arrivals = [rng.uniform(0.0, 20.0) for _ in range(count)]
    work = [
        episode(f"e{i}", 0, tokens[i], prompt=1, latency=arrivals[i], observation=prompts[i] - 1) for i in range(count)
    ]
    _, result = one_engine(LinearTimes(context=times.context, prefill=times.prefill), work)
    slow = max(token_loop(times, prompts, tokens, arrivals))
    assert result.steps[-1].ended_at == pytest.approx(slow, rel=0.01), seed
