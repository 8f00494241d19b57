"""Summary, report and checkpoint of a finished run, from its folder alone."""

import itertools
import json
import re

import pytest

from services.common import wire
from services.common.blobs import BlobStore
from services.common.errors import LibraError
from services.ops import checker, checkpoint, jobs, report, summary, timeline, workload
from services.ops.archive import Archive
from tests.support.records import NODE, RUN, TinyRun, copy, edit

KEYS = {
    "eval_reward_start", "eval_reward_end", "steps", "trajectories_trained", "tokens_generated", "wall_s",
    "tokens_per_s", "reassignments", "reassignment_list", "preemptions", "preempted_resumed", "tokens_lost",
    "tokens_regenerated", "trained_twice", "max_staleness", "staleness_bound", "segments_mismatched", "seed", "machine",
}  # fmt: skip


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = TinyRun(tmp_path_factory.mktemp("plain") / "tiny", with_model=False).build().folder
    checker.write(folder, checker.check(folder, rescore=False))
    return folder


@pytest.fixture
def folder(plain, tmp_path):
    return copy(plain, tmp_path / "tiny")


def test_summary_has_exactly_the_agreed_keys_and_the_runs_numbers(folder):
    content = summary.write(Archive(folder))
    assert set(content) == KEYS
    assert content == json.loads((folder / "summary.json").read_text())
    assert content["steps"] == 2
    assert content["trajectories_trained"] == 8
    assert content["tokens_generated"] == 106
    assert content["wall_s"] > 0
    assert content["reassignments"] == {"to_training": 1, "to_rollout": 1}
    assert content["preemptions"] == {"cmlfq": 1, "handover": 0, "operator": 0}
    assert (content["preempted_resumed"], content["tokens_lost"], content["trained_twice"]) == (1, 0, 0)
    assert (content["max_staleness"], content["staleness_bound"], content["seed"]) == (1, 2, 7)
    assert content["eval_reward_start"] is None, "no evaluation is in these records"


def test_a_command_that_came_too_late_preempted_nothing(folder):
    def late(rows):
        name = f"{RUN}/trajectories/0-0"
        at = next(i for i, r in enumerate(rows) if r["name"] == name and r["to_state"] == "SCORED")
        command = next(r for r in rows if r["kind"].endswith("COMMAND") and r["to_state"] == "PENDING")
        rows.insert(at, {**command, "name": "commands/late", "related": [name, "cmlfq"]})
        rows.append({**command, "name": "commands/late", "from_state": "PENDING", "to_state": "SUCCEEDED"})

    edit(folder, "records/events.jsonl", late)
    assert summary.build(Archive(folder))["preemptions"]["cmlfq"] == 1


def test_each_move_tells_its_predicted_and_observed_gain(folder):
    first, second = summary.build(Archive(folder))["reassignment_list"]
    assert (first["from"], first["to"], first["accelerators"]) == ("ROLLOUT", "TRAINER", [f"{NODE}/accelerators/2"])
    assert (first["predicted_gain_tokens_per_s"], first["observed_gain_tokens_per_s"]) == (40.0, 31.5)
    assert (second["to"], second["asked_by"], second["took_s"]) == ("ROLLOUT", "planner", 0.4)


def test_a_repair_without_a_source_is_no_move(folder):
    def repair(rows):
        del rows[0]["sources"]

    edit(folder, "records/reassignments.jsonl", repair)
    assert summary.build(Archive(folder))["reassignments"] == {"to_training": 0, "to_rollout": 1}


def test_a_move_that_was_rolled_back_is_listed_but_not_counted(folder):
    def roll_back(rows):
        rows[0]["state"] = "REASSIGNMENT_STATE_ROLLED_BACK"

    edit(folder, "records/reassignments.jsonl", roll_back)
    content = summary.build(Archive(folder))
    assert content["reassignments"]["to_training"] == 0
    assert [m["state"] for m in content["reassignment_list"]] == ["ROLLED_BACK", "SUCCEEDED"]


def test_evaluation_reward_is_the_mean_of_what_was_delivered(folder):
    def deliver(rows):
        template = rows[0]
        for i, value in enumerate((1.0, 0.0, 1.0, 1.0)):
            name = f"runs/eval-end/trajectories/{i}-0"
            rows.append({**template, "name": name, "state": "TRAJECTORY_STATE_DELIVERED", "reward": {"value": value}})
        void = {**template, "name": "runs/eval-end/trajectories/9-0", "state": "TRAJECTORY_STATE_VOID"}
        rows.append(void)

    edit(folder, "records/trajectories.jsonl", deliver)
    assert summary.build(Archive(folder))["eval_reward_end"] == 0.75


def test_metrics_are_merged_by_step_and_a_redo_does_not_replace_the_first(folder):
    summary.write(Archive(folder))
    rows = [json.loads(r) for r in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [(r["step"], r["redo"]) for r in rows] == [(1, False), (2, False)]


# ---- series


def test_spans_show_who_held_the_moved_accelerator(folder):
    mine = [s for s in timeline.spans(Archive(folder)) if s.accelerator.endswith("/2")]
    assert [r for i, r in enumerate(s.replica for s in mine) if i == 0 or r != mine[i - 1].replica] == [
        "replicas/rollout-3", "replicas/trainer-5", "replicas/rollout-6",
    ]  # fmt: skip
    assert {s.role for s in mine if s.settled} == {"ROLLOUT", "TRAINER"}
    assert all(a.end <= b.start for a, b in itertools.pairwise(mine))


def test_speed_counts_each_generated_token_once(folder):
    times, series = timeline.generation_speed(Archive(folder))
    total = sum(v for values in series.values() for v in values) * timeline.BIN_SECONDS
    # 106 in the record and 6 that a killed worker had generated
    assert total == 112
    assert len(times) == len(series["rollout-1"])


def test_ages_and_rewards_of_steps(folder):
    first, second = timeline.steps(Archive(folder))
    assert first.ages == {0: 42}
    assert second.ages == {0: 42, 1: 22}
    assert first.reward == 0.5


def test_time_split_leaves_out_what_was_before_the_first_sample(folder):
    split = timeline.time_split(Archive(folder))
    assert split["trainer-0"] == pytest.approx({"wait_batch": 1.5, "train": 1.2})
    assert split["rollout-1"] == {"generating": 2.0, "idle": 1.0}


# ---- report


def test_report_is_one_file_without_a_link_to_anything(folder):
    summary.write(Archive(folder))
    text = report.write(Archive(folder)).read_text()
    assert text.count("data:image/svg+xml;base64,") == 7
    assert not re.search(r"""(src|href)=["'](?!data:)""", text)
    assert "http" not in re.sub(r"base64,[A-Za-z0-9+/=]+", "", text)
    assert "every promise holds" in text
    assert "+40.0 tok/s" in text
    assert "+31.5 tok/s" in text


def test_report_names_broken_promises_and_escapes_what_it_shows(folder):
    verdict = json.loads((folder / "verdict.json").read_text())
    verdict["passed"] = False
    verdict["violations"] = [{"check": "P1.two_owners", "resource": "<script>", "text": "a & b"}]
    (folder / "verdict.json").write_text(json.dumps(verdict))
    text = report.render(Archive(folder))
    assert "promises are broken" in text
    assert "&lt;script&gt;" in text
    assert "<script>" not in text


def test_report_of_a_run_that_did_nothing(folder):
    for name in ("members", "manifests", "versions", "trajectories", "reassignments"):
        (folder / "records" / f"{name}.jsonl").write_text("")
    for path in (folder / "history").glob("*.jsonl"):
        path.write_text("")
    (folder / "samples.jsonl").unlink()
    checker.write(folder, checker.check(folder, rescore=False))
    summary.write(Archive(folder))
    assert "No accelerator changed sides." in report.render(Archive(folder))


# ---- checkpoint and runs


def test_checkpoint_is_the_published_weights_with_the_base_models_files(tmp_path):
    base = tmp_path / "base"
    base.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors", "model.safetensors.index.json", "notes.md"):
        (base / name).write_text("base")
    blobs = BlobStore(str(tmp_path / "blobs"))
    version = wire.WeightVersion()
    version.files.shards.add(name="model.safetensors", blob=blobs.put("w", b"trained"))
    target = checkpoint.assemble(version, base, blobs, tmp_path / "checkpoint")
    assert {p.name for p in target.iterdir()} == {"config.json", "tokenizer.json", "model.safetensors"}
    assert (target / "model.safetensors").read_bytes() == b"trained"


def test_checkpoint_from_a_changed_blob_is_refused_and_leaves_no_folder(tmp_path):
    (tmp_path / "base").mkdir()
    blobs = BlobStore(str(tmp_path / "blobs"))
    version = wire.WeightVersion()
    version.files.shards.add(name="model.safetensors", blob=blobs.put("w", b"trained"))
    (tmp_path / "blobs" / "w").write_bytes(b"changed")
    with pytest.raises(LibraError) as refused:
        checkpoint.assemble(version, tmp_path / "base", blobs, tmp_path / "checkpoint")
    assert refused.value.reason == "BLOB_MISMATCH"
    assert not (tmp_path / "checkpoint").exists()


def test_training_run_is_used_up_after_its_steps(tmp_path):
    blobs = BlobStore(str(tmp_path / "blobs"))
    job = jobs.Job(seed=3, steps=5, drift=True, model=tmp_path)
    run = jobs.training(job, blobs)
    lines = blobs.get(run.tasks.file).decode().splitlines()
    assert len(lines) == 5 * jobs.GROUPS == 5 * run.batch.groups
    assert [json.loads(x) for x in lines] == workload.training_tasks(3, 80, True)


def test_both_evaluations_have_the_same_tasks_and_draws(tmp_path):
    blobs = BlobStore(str(tmp_path / "blobs"))
    job = jobs.Job(seed=3, steps=5, drift=True, model=tmp_path)
    before, after = jobs.evaluation(job, tmp_path, blobs), jobs.evaluation(job, tmp_path / "checkpoint", blobs)
    assert before.tasks == after.tasks
    assert (before.seed, before.group_size, before.kind) == (after.seed, 1, wire.RUN_KIND_EVAL)
    assert len(blobs.get(before.tasks.file).splitlines()) == 256
    assert before.sampling.temperature == 1.0


def test_totals_are_of_the_training_run_alone(folder):
    def other(rows):
        rows.append({**rows[0], "name": "runs/eval-start/trajectories/0-0", "state": "TRAJECTORY_STATE_DELIVERED"})

    edit(folder, "records/trajectories.jsonl", other)
    content = summary.build(Archive(folder))
    assert (content["tokens_generated"], content["eval_reward_start"]) == (106, 0.0)
