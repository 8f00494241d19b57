"""Comparisons: the same seeds for all, documents with the agreed fields, and the commands."""

import json
from dataclasses import replace

import numpy as np
import pytest

from services.ops.__main__ import main
from services.simulator import experiment, ladder
from services.simulator.experiment import Experiment, compare, document
from services.simulator.layout import ClusterSpec, Layout, Mode
from services.simulator.parametric import Parametric
from services.simulator.policies import registry
from tests.support.shared import TRACES, needs_traces
from tests.support.sim_times import LinearTimes, LinearTraining
from tests.support.sim_worlds import episode

SMALL = Parametric(groups=4, members=4, mean_start=400.0, mean_end=900.0)
SPEC = ClusterSpec(LinearTimes(), LinearTraining(rate=400.0, fixed=3.0, least=2), accelerators=8, node_size=4)
SIMULATE_FIELDS = {
    "name", "tokens_per_s", "makespan_p50_s", "makespan_p95_s", "idle_rollout", "idle_training", "migrated_ratio",
    "max_staleness", "of_bound",
}  # fmt: skip


def test_a_comparison_has_every_policy_on_every_seed_with_its_spread():
    found = document(compare(Experiment(SPEC, SMALL, steps=6, first=2), "all", 2, workers=1))
    json.dumps(found)
    rows = {row["name"]: row for row in found["policies"]}
    assert list(rows) == list(registry.POLICIES)
    for row in rows.values():
        assert row.keys() >= SIMULATE_FIELDS
        assert row["tokens_per_s"] == pytest.approx(np.mean(row["by_seed"]))
        scored = [[step["makespan_s"] for step in steps[2:]] for steps in row["steps_by_seed"]]
        assert row["makespan_p50_s"] == pytest.approx(np.mean([np.quantile(spans, 0.5) for spans in scored]))
        assert row["steps_by_seed"][0][-1]["layout"] == row["layout"]
        assert row["relayouts"] >= np.mean([len({s["layout"] for s in steps}) - 1 for steps in row["steps_by_seed"]])
        assert row["spread"] == pytest.approx(np.ptp(row["by_seed"]) / np.mean(row["by_seed"]))
        assert 0 <= row["idle_rollout"] < 1
        assert 0 <= row["idle_training"] < 1
        assert row["makespan_p50_s"] <= row["makespan_p95_s"]
    assert rows["clairvoyant"]["of_bound"] == 1.0
    assert {s["for"] for s in found["searches"]} == {"homogeneous", "mixed", "colocated", "foresight"}
    assert rows["best-homogeneous"]["tokens_per_s"] >= rows["static-uniform"]["tokens_per_s"] * 0.98


def test_a_given_layout_is_everyones_but_the_synchronous_ones():
    given = Layout((1, 1, 2), 4)
    chosen = ["libra", "mlfq", "colocated"]
    found = compare(Experiment(SPEC, SMALL, steps=4, first=1, given=given), chosen, 1, workers=1)
    assert [p.layout == given.words() for p in found.policies] == [True, True, False]
    assert [s[0] for s in found.searches] == ["colocated"]
    assert found.notes == ()


def test_on_a_given_layout_nothing_is_set_beside_published_ratios_and_equal_policies_are_named(monkeypatch):
    monkeypatch.setattr(experiment, "Parametric", lambda: SMALL)
    times = LinearTimes(), LinearTraining(least=2)
    chosen = "static-uniform,best-static,sticky-hash"
    found = experiment.r2e_48(*times, chosen, 1, steps=3, given=Layout((1,) * 40, 8), workers=1)
    assert found["published"] == []
    layout = "8 training, 40xTP1"
    assert found["notes"] == [
        f"static-uniform, best-static: on the given layout ({layout}) are all least-loaded routing, and no more"
    ]
    plain, mixed, _ = ({**row, "name": ""} for row in found["policies"])
    assert plain == mixed
    sought = experiment.r2e_48(*times, "static-uniform,best-homogeneous", 1, steps=3, workers=1)
    assert [row["name"] for row in sought["published"]] == ["homogeneous planner over static uniform"]
    assert sought["notes"] == []


@pytest.mark.parametrize("name", list(registry.POLICIES))
def test_every_policy_that_decides_at_intervals_decides_at_the_experiments(name, monkeypatch):
    made = []
    build = registry.build
    monkeypatch.setattr(registry, "build", lambda *asked: made.extend(build(*asked)) or made)
    found = registry.Layouts(
        dict.fromkeys(("uniform", "homogeneous", "mixed", "foresight", "colocated"), Layout((2,), 4))
    )
    asked = Experiment(SPEC, replace(SMALL, groups=2, members=2), steps=2, first=0, cycle_s=0.9)
    experiment.simulate((asked, name, found, 1))
    assert made
    assert {p.decide_every_s for p in made} <= {None, 0.9}


def test_processes_change_nothing():
    asked = Experiment(SPEC, SMALL, steps=3, first=1)
    assert compare(asked, "static-uniform,sticky-hash", 2, workers=2) == compare(
        asked, "static-uniform,sticky-hash", 2, workers=1
    )


def test_without_the_clairvoyant_there_is_no_ratio_to_it():
    found = document(compare(Experiment(SPEC, SMALL, steps=3, first=1), "static-uniform", 1, workers=1))
    assert found["policies"][0]["of_bound"] is None
    assert found["cycle_s"] == 5.0


def test_rollout_alone_leaves_synchronous_policies_out_and_says_so():
    spec = replace(SPEC, training=None)
    found = compare(
        Experiment(spec, SMALL, steps=1, first=0, mode=Mode.ROLLOUT), "static-uniform,colocated", 1, workers=1
    )
    assert [p.name for p in found.policies] == ["static-uniform"]
    assert "colocated: nothing is trained here" in found.notes[0]


def test_where_nothing_is_trained_ours_rides_on_the_layout_that_was_searched_for():
    """A slow fleet of TP1 engines would say nothing of what it does with trajectories."""
    spec = replace(SPEC, training=None)
    asked = Experiment(spec, SMALL, steps=1, first=0, mode=Mode.ROLLOUT)
    found = {p.name: p for p in compare(asked, "libra,best-static,static-uniform", 1, workers=1).policies}
    assert found["libra"].layout == found["best-static"].layout != found["static-uniform"].layout
    assert [name for name, _, _ in compare(asked, "libra", 1, workers=1).searches] == ["homogeneous", "mixed"]


def test_the_preset_has_the_published_size():
    asked = experiment.r2e_experiment(LinearTimes(), LinearTraining())
    assert asked.spec.accelerators == 48
    assert len(asked.workload.batch(0, 1)) == 512
    assert asked.steps == 20
    assert asked.workload.mean(0) == 2_500
    assert asked.workload.mean(19) == pytest.approx(11_500)
    found = experiment.r2e_48(LinearTimes(), LinearTraining(), "static-uniform", 1, steps=3, workers=1)
    assert [row["name"] for row in found["policies"]] == ["static-uniform"]
    assert found["published"] == []


def test_published_ratios_are_set_beside_those_that_were_got():
    rates = {"best-homogeneous": 300.0, "static-uniform": 200.0, "libra": 500.0}
    rows = {r["name"]: r for r in ladder.rungs({"name": n, "tokens_per_s": r} for n, r in rates.items())}
    assert {n: r["got"] for n, r in rows.items()} == {
        "homogeneous planner over static uniform": 1.5,
        "all over static uniform": 2.5,
    }
    assert rows["all over static uniform"]["given"] == 1.8


def test_the_shift_preset_has_both_workloads():
    asked = experiment.shift_experiments(LinearTimes(), LinearTraining())
    shift, families = asked["shift"].workload, asked["families"].workload
    assert shift.mean(10) / shift.mean(9) == 4.0
    assert [f.name for f in families.families] == ["code", "search"]


def pool():
    return [
        episode(f"g{g}/{m}", *[20 * (g + 1)] * (m + 1), group=f"g{g}", prompt=50) for g in range(6) for m in range(2)
    ]


def test_a_replay_has_a_cell_for_each_condition_and_pairs_its_samples():
    found = experiment.replay(
        pool(), {"linear": LinearTimes()}, "libra,best-homogeneous,clairvoyant", 3, latencies=(0.0, 5.0), scales=(1.0, 4.0),
        workers=1,
    )  # fmt: skip
    json.dumps(found)
    cells = {(c["profile"], c["latency"], c["scale"]): c for c in found["cells"]}
    assert set(cells) == {("linear", lat, scale) for lat in (0.0, 5.0) for scale in (1.0, 4.0)}
    for cell in cells.values():
        for row in cell["policies"]:
            assert row["interval"][0] <= row["makespan_s"] <= row["interval"][1]
            assert row["makespan_s"] >= cell["bound_s"] * 0.999
        assert cell["policies"][-1]["of_bound"] == 1.0
    slow, quick = cells["linear", 5.0, 1.0]["policies"][1], cells["linear", 0.0, 1.0]["policies"][1]
    assert slow["makespan_s"] > quick["makespan_s"] + 4.0
    longer = cells["linear", 0.0, 4.0]["policies"][1]
    assert longer["makespan_s"] > 2 * quick["makespan_s"]


def write_trace(path):
    rows = [
        {
            "id": e.id,
            "group": e.group,
            "prompt": e.prompt,
            "turns": [
                {
                    "gen": t.generated,
                    "tool": t.tool or None,
                    "out": t.outcome,
                    "lat_s": t.latency_s,
                    "obs": t.observation,
                }
                for t in e.turns
            ],
        }
        for e in pool()
    ]
    path.write_text("\n".join(json.dumps(r) for r in [{"schema": "agentic-traj/1"}, *rows]))


def test_the_replay_command_prints_the_document_or_tables(tmp_path, capsys):
    path = tmp_path / "small.jsonl"
    write_trace(path)
    common = ["replay", str(path), "--policies", "static-uniform,clairvoyant", "--samples", "2", "--workers", "1"]
    assert main([*common, "--profile", "a100-modelled", "--latency", "1", "--scale", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in found["cells"][0]["policies"]] == ["static-uniform", "clairvoyant"]
    assert found["episodes"] == 12
    assert main([*common, "--profile", "a100-modelled", "--latency", "1", "--scale", "4"]) == 0
    shown = capsys.readouterr().out
    assert "a100-modelled, tool seconds x1, generated tokens x4; quantiles of 2 samples" in shown
    assert "clairvoyant" in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["replay", "{file}", "--policies", "libro"], "did you mean 'libra'"),
        (["replay", "{file}", "--profile", "b200"], "no profile 'b200'"),
        (["replay", "{file}.none"], "cannot be read"),
        (["replay", "{file}", "--scale", "0"], "scale of generated 0"),
        (["simulate", "--preset", "r2e-48", "--layout", "8xTP1"], "expected such as '24 training, 8xTP1 + 2xTP2'"),
        (["simulate", "--preset", "r2e-49"], "expected one of anchors, r2e-48, shift-48, failures-4"),
    ],
)
def test_wrong_input_ends_with_2_and_says_what_was_expected(tmp_path, capsys, arguments, words):
    path = tmp_path / "small.jsonl"
    write_trace(path)
    assert main([a.replace("{file}", str(path)) for a in arguments]) == 2
    assert words in capsys.readouterr().err


@needs_traces
def test_recorded_episodes_replay_on_modelled_hardware(capsys):
    arguments = ["--policies", "libra,best-homogeneous,clairvoyant", "--profile", "a100-modelled", "--latency", "1"]
    path = str(TRACES / "swe_agent_mit.jsonl")
    assert main(["replay", path, *arguments, "--scale", "1", "--samples", "2", "--workers", "1", "--json"]) == 0
    [cell] = json.loads(capsys.readouterr().out)["cells"]
    assert all(row["makespan_s"] >= cell["bound_s"] for row in cell["policies"])


def test_a_layout_is_read_as_it_is_written():
    for layout in (Layout((1,) * 8 + (2, 2, 4), 24), Layout((8,), 0)):
        assert Layout.parse(layout.words()) == layout


def test_failures_are_compared_with_a_fleet_that_never_had_the_worker():
    found = experiment.failures_4(LinearTimes(), "static-uniform", 1, workers=1)
    rows = {row["kind"]: row for row in found["policies"]}
    assert list(rows) == ["die", "hang", "slow"]
    assert rows["die"]["placed_late"] == rows["hang"]["placed_late"] == 0
    assert rows["slow"]["ratio"] > 1.5, "nobody notices: what it has takes four times as long"
    assert 0.7 < rows["die"]["ratio"] < 1.3
