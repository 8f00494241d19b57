"""Variants of `libra` beside itself: each lacks what it says and nothing else, and the presets' documents."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from services.common.errors import ConfigError
from services.ops.__main__ import main
from services.simulator import contrasts, presets, profiles
from services.simulator.cluster import Cluster
from services.simulator.contrasts import Case, Row, Shuffled, contrast
from services.simulator.experiment import Experiment
from services.simulator.layout import ClusterSpec, Layout
from services.simulator.parametric import REPAIR, Parametric
from services.simulator.policies import ablated
from services.simulator.policies.libra import Libra
from services.simulator.processes import here
from services.simulator.steptimes import ModelledEngine
from services.simulator.workload import Episode, Fixed
from tests.support.sim_times import LinearTimes, LinearTraining
from tests.support.sim_worlds import episode

SMALL = Parametric((REPAIR,), groups=4, members=4, mean_start=400.0, mean_end=900.0)
SPEC = ClusterSpec(LinearTimes(), LinearTraining(rate=400.0, fixed=3.0, least=2), accelerators=8, node_size=4)
LONG = replace(SMALL, mean_start=4_000.0, mean_end=4_000.0)
MANY = replace(SMALL, groups=8, members=8, mean_start=2_000.0, mean_end=2_000.0)
"""Enough for the tree over tool returns to be used."""
MIX, FOUR = Layout((1, 1, 2), 4), Layout((1, 1, 1, 1), 4)
FIELDS = {"name", "instead", "tokens_per_s", "by_seed", "libra_over", "libra_over_by_seed", "interval", "layout"}


def ran(policy, workload=SMALL, spec=SPEC, steps=4):
    cluster = Cluster(spec, workload, policy, seed=1, steps=steps)
    return cluster, cluster.run()


def same_but_for_its_name(one, other):
    return replace(one, policy="") == replace(other, policy="")


# ---- variants


def test_what_is_not_preempted_and_not_moved_stays():
    _, whole = ran(Libra(MIX), LONG)
    _, settled = ran(ablated.Settled(MIX), LONG)
    assert whole.moves > 0
    assert settled.moves == 0


def test_without_the_planner_the_layout_stays_half_and_half():
    _, run = ran(ablated.Unplanned(), steps=6)
    assert run.relayouts == 0
    assert {step.layout for step in run.steps} == {"4 training, 4xTP1"}


def test_least_loaded_placement_counts_trajectories_for_each_accelerator():
    cluster = Cluster(
        SPEC, Fixed(tuple(episode(f"e{i}", 500) for i in range(16))), ablated.LeastLoaded(MIX), seed=1, steps=1
    )
    cluster._begin()
    assert [(e.state.tp, e.state.assigned) for e in cluster.engines] == [(1, 8), (1, 8), (2, 16)]


def test_uncapped_engines_are_given_all_there_is_and_stop_some_by_themselves():
    spec = replace(SPEC, times=LinearTimes(kv=3_000), min_kv_tokens=1)
    workload = Fixed(tuple(episode(f"e{i}", 900, prompt=200) for i in range(24)))
    stopped = []
    for make, queues in ((Libra, True), (ablated.Uncapped, False)):
        cluster = Cluster(spec, workload, make(FOUR), seed=1, steps=2)
        cluster._begin()
        assert bool(cluster.view.queued) == queues
        stopped.append(ran(make(FOUR), workload, spec, 2)[1].preemptions)
    assert stopped[0] < stopped[1]


def test_without_reservation_a_lease_keeps_room_for_its_context_alone():
    spec = replace(SPEC, times=LinearTimes(kv=20_000), min_kv_tokens=1)
    for policy, grown in ((Libra(MIX), True), (ablated.Unreserved(MIX), False)):
        cluster = Cluster(spec, SMALL, policy, seed=1, steps=1)
        cluster._begin()
        leased = [t for t in cluster.view.live.values() if t.engine >= 0]
        assert leased
        assert all((policy.live.reserved(str(t.index)) > t.context) == grown for t in leased)


def test_a_constant_estimate_is_every_trajectorys_at_every_time():
    cluster = Cluster(SPEC, LONG, ablated.ConstantEstimate(MIX), seed=1, steps=2)
    cluster._begin()
    view = cluster.policy.live.view(0.0)
    assert len(view.running) == len(cluster.view.live)
    assert {t.estimate_p50 for t in (*view.queued, *view.running)} == {ablated.GUESS_TOKENS}


def all_well(given: Episode) -> Episode:
    return replace(given, turns=tuple(replace(turn, outcome="ok") for turn in given.turns))


@pytest.mark.parametrize("make", [ablated.OutcomeBlind, lambda layout: Libra(layout, outcomes=False)])
def test_who_is_blind_to_outcomes_decides_as_if_all_calls_went_well(make):
    given = MANY.batch(0, 1)
    assert any(turn.outcome != "ok" for e in given for turn in e.turns)
    _, blind = ran(make(MIX), Fixed(tuple(given)))
    _, whole = ran(Libra(MIX), Fixed(tuple(all_well(e) for e in given)))
    assert same_but_for_its_name(blind, whole)


def test_who_is_not_blind_to_them_does_not():
    _, blind = ran(ablated.OutcomeBlind(MIX), MANY)
    _, whole = ran(Libra(MIX), MANY)
    assert not same_but_for_its_name(blind, whole)


def test_every_variant_says_what_it_does_instead_and_has_a_name_of_its_own():
    every = (ablated.PLANNER, *ablated.QUEUE)
    assert all(variant.instead for variant in every)
    assert len({Libra.name, *(variant.policy.name for variant in every)}) == 1 + len(every)


# ---- what is compared


def test_a_contrast_is_paired_by_seed_and_libra_is_itself_over_itself():
    rows = (contrasts.whole(), *(contrasts.without(v) for v in ablated.QUEUE))
    case = Case("mix", Experiment(SPEC, SMALL, steps=4, first=1, given=MIX), rows, (("told", 2.0),))
    (found,) = contrast([case], 2, here)
    json.dumps(found)
    assert (found["name"], found["told"], found["steps"], found["scored_from"]) == ("mix", 2.0, 4, 1)
    assert [row["name"] for row in found["policies"]] == [row.name for row in rows]
    ours = found["policies"][0]
    assert ours["libra_over_by_seed"] == [1.0, 1.0]
    for row in found["policies"]:
        assert row.keys() >= FIELDS
        expected = [a / b for a, b in zip(ours["by_seed"], row["by_seed"], strict=True)]
        assert row["libra_over_by_seed"] == pytest.approx(expected)
        assert row["libra_over"] == pytest.approx(np.mean(expected))
        assert min(expected) <= row["interval"][0] <= row["interval"][1] <= max(expected)


def test_a_row_with_a_layout_of_its_own_has_it():
    rows = (contrasts.whole(), Row("other", Libra, "", Layout((2, 2), 4)))
    (found,) = contrast([Case("", Experiment(SPEC, SMALL, steps=2, first=0, given=MIX), rows)], 1, here)
    assert [row["layout"] for row in found["policies"]] == [MIX.words(), "4 training, 2xTP2"]


def test_shuffling_changes_nothing_but_which_call_had_which_outcome_and_depends_on_seed_and_step():
    shuffled = Shuffled(SMALL)
    before, after = SMALL.batch(2, 1), shuffled.batch(2, 1)
    assert [all_well(e) for e in before] == [all_well(e) for e in after]
    for one, other in zip(before, after, strict=True):
        assert sorted(t.outcome for t in one.turns if t.tool) == sorted(t.outcome for t in other.turns if t.tool)
    assert before != after
    assert after == shuffled.batch(2, 1)
    still = Shuffled(Fixed(tuple(before)))
    orders = [
        [[t.outcome for t in e.turns] for e in still.batch(step, seed)] for step, seed in ((0, 1), (1, 1), (0, 2))
    ]
    assert orders[0] != orders[1]
    assert orders[0] != orders[2]


@pytest.mark.parametrize("profile", ["a100-modelled", "a800-paper"])
def test_the_layout_that_is_short_of_kv_cache_is_so_by_the_factor_that_is_stated(profile):
    times = ModelledEngine(profiles.profile(profile).hardware, profiles.model("qwen3-14b"))
    spec = ClusterSpec(times, None)
    workload = contrasts._kv_workload(contrasts.LONG_MEAN)
    layout = contrasts.short_of_room(spec, workload)
    case = contrasts._kv_case("", spec, workload, layout, 4)
    told = dict(case.told)
    assert told["in_flight"] == 512
    assert told["kv_demand"] >= contrasts.OVERSUBSCRIBED
    assert layout.rollout + layout.training == spec.accelerators
    ample = contrasts._kv_case("", spec, contrasts._kv_workload(contrasts.SHORT_MEAN), contrasts.AMPLE_LAYOUT, 4)
    assert dict(ample.told)["kv_demand"] < 1


# ---- presets


@pytest.fixture
def small(monkeypatch):
    """The presets' scenarios with a few short episodes on a small cluster with linear times."""
    monkeypatch.setattr(presets.Asked, "times", lambda _: (LinearTimes(), LinearTraining(least=2)))
    monkeypatch.setattr(
        contrasts, "r2e_experiment", lambda *_, steps, given: Experiment(SPEC, SMALL, steps, first=1, given=given)
    )
    monkeypatch.setattr(contrasts, "KV_GROUPS", 1)
    monkeypatch.setattr(contrasts, "LONG_MEAN", 2_000.0)
    monkeypatch.setattr(contrasts, "OUTCOMES_MEAN", 300.0)
    monkeypatch.setattr(contrasts, "TRACE_SCALE", 2.0)


def recorded(path):
    turns = [{"gen": 9, "tool": "a", "out": out, "lat_s": 0.1, "obs": 3} for out in ("ok", "error", "ok")]
    lines = [{"schema": "agentic-traj/1"}]
    lines += [{"id": f"{i}", "group": f"{i // 2}", "prompt": 5, "turns": [*turns, {"gen": 4}]} for i in range(6)]
    for line in lines[1:]:
        line["turns"][-1] |= {"tool": None, "out": None, "lat_s": None, "obs": 0}
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return str(path)


def test_outcomes_shows_every_workload_and_each_trace_as_it_is_and_shuffled(small, tmp_path, capsys):
    trace = recorded(tmp_path / "mine.jsonl")
    assert (
        main(
            [
                "simulate",
                "--preset",
                "outcomes",
                "--seeds",
                "2",
                "--steps",
                "2",
                "--workers",
                "1",
                "--trace",
                trace,
                "--json",
            ]
        )
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert [case["name"] for case in found["cases"]] == [
        "silent", "caused", "caused, shuffled", "mine.jsonl", "mine.jsonl, shuffled",
    ]  # fmt: skip
    for case in found["cases"]:
        assert [row["name"] for row in case["policies"]] == ["libra", "outcome-blind", "clairvoyant"]
        assert {row["layout"] for row in case["policies"]} == {contrasts.OUTCOMES_LAYOUT.words()}
    assert found["profile"] == "a100-modelled"


def test_two_traces_of_one_name_are_refused(tmp_path):
    (tmp_path / "other").mkdir()
    paths = (recorded(tmp_path / "a.jsonl"), recorded(tmp_path / "other" / "a.jsonl"))
    with pytest.raises(ConfigError, match="two files have the same name"):
        presets.run("outcomes", {"trace": tuple(map(Path, paths))})


def test_kv_48_says_how_much_of_the_kv_caches_is_asked_for(small):
    shown = presets.run("kv-48", {"seeds": 1, "steps": 3, "workers": 1})
    json.dumps(shown.document)
    assert [case["name"] for case in shown.document["cases"]] == ["oversubscribed", "ample"]
    for case, note in zip(shown.document["cases"], shown.notes, strict=True):
        assert {row["name"] for row in case["policies"]} == {
            "libra",
            "no-kv-reservation",
            "uncapped",
            "full-kv-reservation",
        }
        assert f"{case['kv_demand']:.2f} times what all KV caches hold" in note
    assert len(shown.tables) == 2


def test_an_ablation_has_every_mechanism_once_and_the_policies_that_it_rides_on(small):
    shown = presets.run("ablation", {"seeds": 1, "steps": 3, "workers": 1})
    json.dumps(shown.document)
    rows = {row["name"]: row for row in shown.document["policies"]}
    assert list(rows) == [
        "libra", "no-planner", "best-layout", "no-moves", "least-loaded-placement", "no-kv-reservation", "uncapped",
        "constant-estimate", "outcome-blind", "static-uniform", "best-homogeneous",
    ]  # fmt: skip
    assert rows["best-layout"]["layout"] == rows["best-homogeneous"]["layout"]
    assert rows["no-planner"]["layout"] == rows["static-uniform"]["layout"] == "4 training, 4xTP1"
    assert all(rows[name]["relayouts"] == 0 for name in ("no-planner", "best-layout", "static-uniform"))
    assert len(shown.document["searches"]) == 1


def test_on_a_given_layout_an_ablation_plans_and_searches_for_nothing(small):
    shown = presets.run("ablation", {"seeds": 1, "steps": 2, "workers": 1, "layout": MIX})
    names = [row["name"] for row in shown.document["policies"]]
    assert names == ["libra", *(v.policy.name for v in ablated.QUEUE), "static-uniform"]
    assert {row["layout"] for row in shown.document["policies"]} == {MIX.words()}
    assert shown.document["searches"] == []


def test_a_preset_has_defaults_of_its_own_which_options_replace(monkeypatch):
    asked = []
    own = replace(presets.PRESETS["outcomes"], run=asked.append)
    monkeypatch.setitem(presets.PRESETS, "outcomes", own)
    presets.run("outcomes", {})
    presets.run("outcomes", {"steps": 2})
    assert [(a.steps, a.seeds) for a in asked] == [(6, 8), (2, 8)]
