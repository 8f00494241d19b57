"""Episodes: the generator, the readers, and what may be done to them."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.errors import ConfigError
from services.simulator import traces
from services.simulator.latency import TABLES
from services.simulator.parametric import CAP_TOKENS, CODE, REPAIR, SEARCH, Parametric, Shift, log_middle
from services.simulator.workload import Resampled, scaled, shuffled_outcomes
from tests.support.shared import TRACES, needs_traces
from tests.support.sim_worlds import episode


def mean_generated(batch):
    return np.mean([e.generated for e in batch])


def test_the_same_seed_gives_the_same_episodes_and_another_others():
    workload = Parametric(groups=4, members=4)
    assert workload.batch(3, 1) == workload.batch(3, 1)
    assert workload.batch(3, 1) != workload.batch(3, 2)
    assert workload.batch(3, 1) != workload.batch(4, 1)


@settings(max_examples=25)
@given(st.sampled_from([CODE, SEARCH, REPAIR]), st.integers(0, 30), st.integers(0, 1_000))
def test_every_episode_is_whole_and_within_the_cap(family, step, seed):
    for item in Parametric(families=(family,), groups=3, members=4).batch(step, seed):
        assert item.tokens <= CAP_TOKENS
        assert all(t.generated >= 1 and t.observation >= 0 and t.latency_s >= 0 for t in item.turns)
        assert [bool(t.tool) for t in item.turns] == [True] * (len(item.turns) - 1) + [False]


@pytest.mark.parametrize("family", [CODE, SEARCH, REPAIR])
@pytest.mark.parametrize("step", [0, 19])
def test_mean_length_drifts_as_asked(family, step):
    workload = Parametric(families=(family,), groups=64, members=4)
    got = np.mean([mean_generated(workload.batch(step, seed)) for seed in range(6)])
    assert got == pytest.approx({0: 2_500.0, 19: 11_500.0}[step], rel=0.2)


def test_lengths_have_a_long_tail_and_siblings_correlate():
    batch = Parametric(groups=128, members=8).batch(0, 5)
    lengths = np.sort([e.generated for e in batch])
    assert lengths[-len(lengths) // 10 :].sum() > 0.3 * lengths.sum()
    logs = np.log([e.generated for e in batch]).reshape(128, 8)
    between, within = logs.mean(axis=1).var(ddof=1), logs.var(axis=1, ddof=1).mean()
    correlation = (between - within / 8) / (between - within / 8 + within)
    assert correlation == pytest.approx(CODE.siblings, abs=0.12)


def correlation_of_failures(family):
    """Between the share of failures in an episode's first four calls and the tokens that follow them."""
    shares, rest = [], []
    for item in Parametric(families=(family,), groups=200, members=8, mean_start=4_000, mean_end=4_000).batch(0, 3):
        if len(item.turns) >= 6:
            shares.append(np.mean([t.outcome != "ok" for t in item.turns[:4]]))
            rest.append(np.log(sum(t.generated for t in item.turns[4:])))
    return np.corrcoef(shares, rest)[0, 1]


def test_failures_lengthen_what_follows_only_where_they_are_made_to():
    assert abs(correlation_of_failures(CODE)) < 0.1
    assert correlation_of_failures(REPAIR) > 0.2


def test_an_abrupt_shift_multiplies_lengths_and_seconds():
    workload = Parametric(mean_start=1_500, mean_end=1_500, shift=Shift(5), groups=64, members=4)
    before, after = workload.batch(4, 1), workload.batch(5, 1)
    assert mean_generated(after) / mean_generated(before) == pytest.approx(4.0, rel=0.35)
    seconds = [np.mean([t.latency_s for e in batch for t in e.turns if t.tool]) for batch in (before, after)]
    assert seconds[1] / seconds[0] == pytest.approx(5.0, rel=0.4)


def test_two_families_take_turns():
    workload = Parametric(families=(CODE, SEARCH), family_steps=2, groups=2, members=2)
    tools = [{t.tool for e in workload.batch(step, 0) for t in e.turns} for step in range(5)]
    assert ["web" in t for t in tools] == [False, False, True, True, False]


@given(st.floats(50, 30_000), st.floats(0.2, 1.5))
def test_the_middle_gives_the_mean_under_the_cap(mean, spread):
    cap = 20_000.0
    draws = np.exp(log_middle(mean, spread, cap) + spread * np.random.default_rng(0).standard_normal(200_000))
    assert np.minimum(draws, cap).mean() == pytest.approx(min(mean, 0.9 * cap), rel=0.03)


def test_latencies_follow_their_table():
    table = TABLES["exec"]
    draws = table.draw(np.random.default_rng(1), 20_000)
    assert draws.min() >= table.seconds[0]
    assert draws.max() <= table.seconds[-1]
    assert np.quantile(draws, 0.75) == pytest.approx(1.555, rel=0.05)


@given(st.integers(0, 1_000))
def test_shuffling_permutes_outcomes_within_each_episode_and_nothing_else(seed):
    batch = Parametric(families=(REPAIR,), groups=2, members=3).batch(0, seed)
    shuffled = shuffled_outcomes(batch, np.random.default_rng(seed))
    for before, after in zip(batch, shuffled, strict=True):
        assert Counter(t.outcome for t in before.turns) == Counter(t.outcome for t in after.turns)
        assert before.turns[-1] == after.turns[-1]
        assert [(t.generated, t.tool, t.latency_s, t.observation) for t in before.turns] == [
            (t.generated, t.tool, t.latency_s, t.observation) for t in after.turns
        ]


def test_shuffling_does_change_what_outcomes_precede():
    batch = Parametric(families=(REPAIR,), groups=4, members=4).batch(0, 1)
    assert [e.turns for e in batch] != [e.turns for e in shuffled_outcomes(batch, np.random.default_rng(1))]


def test_scaling_multiplies_tokens_and_seconds():
    [item] = scaled([episode("a", 10, 0, 7, latency=2.0)], generated=4.0, latency=5.0)
    assert [t.generated for t in item.turns] == [40, 1, 28]
    assert [t.latency_s for t in item.turns] == [10.0, 10.0, 0.0]
    with pytest.raises(ConfigError, match="scale of generated 0"):
        scaled([], generated=0.0)


def test_a_bootstrap_sample_has_whole_groups_and_unique_names():
    pool = tuple(episode(f"g{g}/{m}", 5, group=f"g{g}") for g in range(5) for m in range(3))
    sample = Resampled(pool, groups=8).batch(0, 7)
    assert len(sample) == 24
    assert len({e.id for e in sample}) == 24
    assert set(Counter(e.group for e in sample).values()) == {3}
    assert sample == Resampled(pool, groups=8).batch(0, 7)
    assert sample != Resampled(pool, groups=8).batch(0, 8)


HEADER = json.dumps({"schema": "agentic-traj/1"})
TURN = {"gen": 5, "tool": "bash", "out": "ok", "lat_s": 1.5, "lat_kind": "measured", "obs": 3}
GOOD = {"id": "a", "group": "g", "prompt": 10, "turns": [TURN, {**TURN, "tool": None, "lat_s": None}]}


def written(folder: Path, *lines: object) -> Path:
    path = folder / "episodes.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_a_trace_is_read_and_missing_seconds_are_drawn_once(tmp_path):
    unknown = {**TURN, "lat_s": None}
    gated = {**TURN, "lat_s": 99.0, "lat_kind": "measured_incl_llm_gate"}
    path = written(tmp_path, HEADER, GOOD, "", {**GOOD, "id": "b", "turns": [unknown, gated, TURN]})
    first, second = traces.read(path, np.random.default_rng(1))
    assert [t.latency_s for t in first.turns] == [1.5, 0.0]
    assert (first.generated, first.tokens) == (10, 10 + 10 + 3)
    low, high = TABLES["exec"].seconds[0], TABLES["exec"].seconds[-1]
    assert all(low <= t.latency_s <= high for t in second.turns[:2])
    assert second.turns[0].latency_s != second.turns[1].latency_s != 99.0
    assert [first, second] == traces.read(path, np.random.default_rng(1))
    assert [first, second] != traces.read(path, np.random.default_rng(2))


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "empty; expected a header"),
        (["{"], r":1: not JSON at column 2"),
        (['{"schema": "agentic-traj/2"}'], r":1: schema is 'agentic-traj/2', expected 'agentic-traj/1'"),
        ([HEADER], "has a header and no episode"),
        ([HEADER, GOOD, "[1]"], r":3: list where a JSON object was expected"),
        ([HEADER, GOOD, GOOD], r":3: id 'a' was used on line 2"),
        ([HEADER, {**GOOD, "prompt": -1}], r":2: prompt is -1, expected a number of tokens >= 0"),
        ([HEADER, {**GOOD, "turns": []}], r":2: turns is empty"),
        ([HEADER, {k: v for k, v in GOOD.items() if k != "group"}], r":2: group is missing; expected str"),
        ([HEADER, {**GOOD, "turns": [TURN, 5]}], r":2: turns\[1\]: 5 where an object"),
        ([HEADER, {**GOOD, "turns": [{**TURN, "gen": 1.5}]}], r":2: turns\[0\]: gen is 1.5, expected int"),
        ([HEADER, {**GOOD, "turns": [{**TURN, "gen": True}]}], r":2: turns\[0\]: gen is True"),
        ([HEADER, {**GOOD, "turns": [{**TURN, "out": "bad"}]}], r"out is 'bad', expected one of ok, error, timeout"),
        ([HEADER, {**GOOD, "turns": [{**TURN, "lat_s": -2}]}], r"lat_s is -2, expected seconds >= 0 or null"),
        ([HEADER, {**GOOD, "turns": [{**TURN, "tool": 3}]}], r"tool is 3, expected a name or null"),
    ],
)
def test_a_bad_line_is_named_with_what_was_expected(tmp_path, lines, words):
    with pytest.raises(ConfigError, match=words):
        traces.read(written(tmp_path, *lines), np.random.default_rng(0))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none.jsonl: cannot be read"):
        traces.read(tmp_path / "none.jsonl", np.random.default_rng(0))


@needs_traces
@pytest.mark.parametrize(("name", "rows"), [("tau_bench", 96), ("intercode", 5_138), ("swe_agent_mit", 24)])
def test_recorded_episodes_are_read(name, rows):
    path = TRACES / f"{name}.jsonl"
    found = traces.read(path, np.random.default_rng(0))
    raw = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    assert len(found) == len(raw) == rows
    assert [e.generated for e in found] == [sum(t["gen"] for t in r["turns"]) for r in raw]
    assert [len(e.turns) for e in found] == [len(r["turns"]) for r in raw]
