"""The offline checker accepts an honest run and names each falsification of it."""

import json
import shutil

import pytest

from services.common.errors import ConfigError
from services.ops import checker
from services.ops.archive import Archive
from tests.support.records import CRASHED, PREEMPTED, RUN, TinyRun, copy, edit, rehash, replace_segment


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    return TinyRun(tmp_path_factory.mktemp("honest") / "tiny").build().folder


@pytest.fixture
def folder(honest, tmp_path):
    return copy(honest, tmp_path / "tiny")


def broken(folder, *, rescore=False):
    return checker.check(folder, rescore=rescore).broken()


def numbers(folder, *, rescore=False):
    return checker.check(folder, rescore=rescore).numbers


@pytest.mark.slow
def test_honest_run_passes_with_its_true_numbers(folder, capsys):
    assert checker.main(folder, as_json=True) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((folder / "verdict.json").read_text())
    found = printed["numbers"]
    assert found["preempted_resumed"] == 1
    assert found["resumed_elsewhere"] == 1
    assert found["tokens_lost"] == 0
    assert found["tokens_regenerated"] == 6, "the killed worker had generated 6 tokens more than were acknowledged"
    assert found["trained_twice"] == 0
    assert found["max_staleness"] == 1
    assert found["segments_mismatched"] == 0
    assert found["segments_rescored"] == 4, "two segments of each of the two moved trajectories"
    assert found["trained_tokens_checked"] == 106


# ---- tokens


def segments_of(row):
    return row["sequences"][0]["segments"]


def test_dropped_acknowledged_segment_is_lost(folder):
    def drop(rows):
        row = next(r for r in rows if r["name"] == PREEMPTED)
        del segments_of(row)[-1]

    edit(folder, "records/trajectories.jsonl", drop)
    assert "P14.tokens_lost" in broken(folder)
    assert numbers(folder)["tokens_lost"] == 9


def test_vanished_trajectory_is_lost_with_all_its_tokens(folder):
    edit(folder, "records/trajectories.jsonl", lambda rows: [r for r in rows if r["name"] != CRASHED])
    found = broken(folder)
    assert {"P2.lost", "P14.tokens_lost", "P14.unknown_member"} <= set(found)
    assert numbers(folder)["tokens_lost"] == 22


def test_first_segment_cut_out_leaves_a_gap(folder):
    def drop(rows):
        del segments_of(next(r for r in rows if r["name"] == PREEMPTED))[0]

    edit(folder, "records/trajectories.jsonl", drop)
    assert "P14.gap" in broken(folder)


def test_segment_twice_in_the_record_overlaps(folder):
    def double(rows):
        segments = segments_of(next(r for r in rows if r["name"] == PREEMPTED))
        segments.append(segments[-1])

    edit(folder, "records/trajectories.jsonl", double)
    assert "P14.overlap" in broken(folder)


def test_changed_bytes_of_an_acknowledged_blob_are_lost_tokens(folder):
    path = next((folder / "blobs" / "tiny" / "2-0" / "1").glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    found = broken(folder)
    assert {"P14.tokens_lost", "P5.unreadable"} <= set(found)


def test_missing_blob_is_lost_tokens(folder):
    shutil.rmtree(folder / "blobs" / "tiny" / "0-0")
    assert "P14.tokens_lost" in broken(folder)


def test_new_attempt_without_a_failure_of_the_old_loses_its_tokens(folder):
    def renumber(rows):
        next(r for r in rows if r["name"] == PREEMPTED)["attempt"] = 2

    edit(folder, "records/trajectories.jsonl", renumber)
    assert numbers(folder)["tokens_lost"] == 26


def test_tokens_of_an_attempt_that_failed_by_decision_are_discarded_not_lost(folder):
    def fail(rows):
        row = next(r for r in rows if r["name"] == PREEMPTED)
        row["attempt"] = 2
        row["attempts"][0]["failure"] = "FAILURE_CLASS_ENVIRONMENT"
        row["attempts"].append({"number": 2, "leases": 1})

    edit(folder, "records/trajectories.jsonl", fail)
    found = numbers(folder)
    assert (found["tokens_lost"], found["tokens_discarded"]) == (0, 26)


def test_totals_that_disagree_with_their_segments(folder):
    def inflate(rows):
        rows[0]["tokens"]["generated"] = "99"

    edit(folder, "records/trajectories.jsonl", inflate)
    assert broken(folder) == {"P14.totals": 1}


# ---- exactly once


def test_trajectory_in_two_manifests_is_trained_twice(folder):
    def double(rows):
        rows.append({**rows[0], "manifest": f"{RUN}/manifests/2"})

    edit(folder, "records/members.jsonl", double)
    found = broken(folder)
    assert {"P3.trained_twice", "P3.members_changed", "P3.token_sum"} <= set(found)
    assert numbers(folder)["trained_twice"] == 1


def test_trajectory_in_two_manifests_is_found_even_if_the_hashes_were_made_to_fit(folder):
    def double(rows):
        rows.append({**rows[0], "manifest": f"{RUN}/manifests/2"})

    edit(folder, "records/members.jsonl", double)
    rehash(folder)
    found = broken(folder)
    assert "P3.trained_twice" in found
    assert "P3.members_changed" not in found


def test_manifest_applied_in_two_versions_is_trained_twice(folder):
    def same(rows):
        rows[2]["manifest"] = rows[1]["manifest"]

    edit(folder, "records/versions.jsonl", same)
    found = broken(folder)
    assert {"P3.trained_twice", "P3.wrong_base", "P3.step_lost"} <= set(found)


def test_trainer_that_applies_a_manifest_twice_as_new_work(folder):
    edit(folder, "history/trainer-0.jsonl", lambda rows: [*rows, next(r for r in rows if r["kind"] == "trained")])
    assert broken(folder) == {"P3.trained_twice": 1}


def test_redo_after_a_crash_is_not_twice(folder):
    def redo(rows):
        rows.append({**next(r for r in rows if r["kind"] == "trained"), "redo": True})

    edit(folder, "history/trainer-0.jsonl", redo)
    assert broken(folder) == {}


def test_raised_version_of_a_step(folder):
    def up(rows):
        rows[2]["version"]["number"] = "3"

    edit(folder, "records/versions.jsonl", up)
    assert {"P4.versions_skip", "P3.wrong_base"} <= set(broken(folder))


def test_version_that_falls_at_an_engine(folder):
    def fall(rows):
        rows.append({**next(r for r in rows if r["kind"] == "loaded"), "t": 2e9})

    edit(folder, "history/rollout-1.jsonl", fall)
    assert broken(folder) == {"P4.version_fell": 1}


def test_changed_reward_in_a_manifest(folder):
    def change(rows):
        rows[0]["member"]["reward"]["value"] = 0.75

    edit(folder, "records/members.jsonl", change)
    assert broken(folder) == {"P3.members_changed": 1}


def test_member_left_out_of_a_manifest(folder):
    edit(folder, "records/members.jsonl", lambda rows: rows[1:])
    assert {"P3.members_changed", "P3.token_sum", "P3.consumption_differs"} <= set(broken(folder))


# ---- staleness


def test_token_older_than_the_bound(folder):
    def tighten(rows):
        rows[1]["max_versions"] = 0

    edit(folder, "records/manifests.jsonl", tighten)
    found = checker.check(folder, rescore=False)
    # the first segments of the preempted and of the crashed trajectory
    assert found.broken() == {"P5.too_stale": 2}
    assert found.numbers["max_staleness"] == 1


def test_age_is_read_from_the_blob_even_if_the_registered_spans_look_fresh(folder):
    def age(columns):
        columns["weight_version"][columns["weight_version"][:, 1] == 1] = (1, 0)

    replace_segment(folder, PREEMPTED, 1, age)

    def tighten(rows):
        rows[1]["max_versions"] = 0

    edit(folder, "records/manifests.jsonl", tighten)
    found = checker.check(folder, rescore=False).broken()
    assert found["P5.too_stale"] == 3
    # once in the member
    assert found["P5.spans_differ"] == 1


def test_token_of_a_version_after_the_base(folder):
    def raise_version(columns):
        columns["weight_version"][columns["weight_version"][:, 1] == 1] = (1, 9)

    replace_segment(folder, PREEMPTED, 1, raise_version)
    assert {"P5.from_the_future", "P5.spans_differ"} <= set(broken(folder))


def test_masked_tokens_do_not_count_as_trained(folder):
    def mask(rows):
        for row in rows:
            if row["member"]["trajectory"] in (PREEMPTED, CRASHED):
                first = segments_of(row["member"])[0]
                span = first["versions"][0]
                row["member"]["masked"] = [{"first_position": span["first_position"], "tokens": span["tokens"]}]

    edit(folder, "records/members.jsonl", mask)

    def tighten(rows):
        rows[1]["max_versions"] = 0
        rows[1]["divisors"]["trainable_tokens"] = str(int(rows[1]["divisors"]["trainable_tokens"]) - 22)

    edit(folder, "records/manifests.jsonl", tighten)
    found = checker.check(folder, rescore=False)
    assert found.broken() == {}
    assert found.numbers["max_staleness"] == 0


def test_changed_loss_mask(folder):
    def unmask(columns):
        columns["loss_mask"][0] = 1

    replace_segment(folder, f"{RUN}/trajectories/0-0", 0, unmask)
    assert "P5.spans_differ" in broken(folder)


# ---- log-probabilities


@pytest.mark.slow
def test_altered_logprob_in_a_blob_is_found_by_scoring_it_again(folder):
    def alter(columns):
        at = columns["loss_mask"].nonzero()[0][3]
        columns["logprob"][at] += 0.001

    replace_segment(folder, PREEMPTED, 0, alter)
    assert broken(folder) == {}, "every hash was made to fit"
    found = checker.check(folder)
    assert found.broken() == {"P14.logprob_differs": 1}
    assert found.numbers["segments_mismatched"] == 1
    assert "1 of 12 logprobs" in found.violations[0].text


@pytest.mark.slow
def test_wrong_version_and_missing_weights_are_both_named(folder):
    def claim(columns):
        columns["weight_version"][columns["weight_version"][:, 1] == 1] = (1, 0)

    replace_segment(folder, PREEMPTED, 1, claim)
    shutil.rmtree(folder / "blobs" / "tiny" / "weights" / "1-1")
    found = checker.check(folder)
    assert {"P14.logprob_differs", "P14.not_rescored"} <= set(found.broken())
    missing = next(v for v in found.violations if v.check == "P14.not_rescored")
    assert "1-1" in missing.resource


def test_kept_keys_and_values_cannot_be_scored_and_are_named(folder):
    def keep(rows):
        segments_of(next(r for r in rows if r["name"] == PREEMPTED))[0]["kv_policy"] = "KV_POLICY_KEEP"
        segments_of(next(r for r in rows if r["name"] == CRASHED))[0]["kv_policy"] = "KV_POLICY_KEEP"

    edit(folder, "records/trajectories.jsonl", keep)
    assert checker.check(folder).broken() == {"P14.not_rescored": 2}


# ---- ownership


def event_at(rows, name, to_state):
    return next(i for i, r in enumerate(rows) if r["name"] == name and r.get("to_state") == to_state)


def test_removed_release_shows_two_owners(folder):
    def drop(rows):
        del rows[event_at(rows, "replicas/rollout-3", "RELEASED")]

    edit(folder, "records/events.jsonl", drop)
    found = broken(folder)
    assert {"P1.two_owners", "P1.granted_before_release"} <= set(found)


def test_removed_release_shows_two_owners_even_if_the_chain_was_mended(folder):
    def drop(rows):
        # the source's whole end is taken out, so that no chain is broken
        return [
            r for r in rows if not (r["name"] == "replicas/trainer-5" and r["to_state"] in ("RELEASING", "RELEASED"))
        ]

    edit(folder, "records/events.jsonl", drop)
    found = broken(folder)
    assert "events.chain" not in found
    assert {"P1.two_owners", "P1.granted_before_release"} <= set(found)


def test_grant_with_an_old_generation(folder):
    def lower(rows):
        next(r for r in rows if r["name"] == "replicas/rollout-6")["generation"] = "4"

    edit(folder, "records/replicas.jsonl", lower)
    assert broken(folder) == {"P1.generation_fell": 1}


# ---- events and states


def test_missing_event_breaks_the_chain(folder):
    def drop(rows):
        del rows[event_at(rows, PREEMPTED, "SCORED")]

    edit(folder, "records/events.jsonl", drop)
    assert broken(folder) == {"events.chain": 1}


def test_event_told_twice(folder):
    def double(rows):
        rows.insert(10, rows[9])

    edit(folder, "records/events.jsonl", double)
    assert "events.order" in broken(folder)


def test_trajectory_that_never_ended(folder):
    def stay(rows):
        row = next(r for r in rows if r["name"] == PREEMPTED)
        row["state"] = "TRAJECTORY_STATE_QUEUED"

    edit(folder, "records/trajectories.jsonl", stay)
    assert {"P2.not_terminal", "P2.state_differs", "P3.not_marked"} <= set(broken(folder))


def test_trained_without_a_step(folder):
    def forget(rows):
        del next(r for r in rows if r["name"] == PREEMPTED)["consumptions"]

    edit(folder, "records/trajectories.jsonl", forget)
    assert broken(folder) == {"P3.trained_nowhere": 1}


# ---- reading


def test_folder_without_records_is_refused_with_what_was_expected(tmp_path):
    with pytest.raises(ConfigError, match="no folder 'records'"):
        checker.main(tmp_path)


def test_cut_record_file_is_refused_with_its_line(folder):
    path = folder / "records" / "members.jsonl"
    path.write_text(path.read_text()[:-20])
    with pytest.raises(ConfigError, match=r"members.jsonl:\d+: not a JSON line"):
        checker.check(folder, rescore=False)


def test_history_line_torn_by_a_kill_is_left_out(folder):
    path = folder / "history" / "rollout-3.jsonl"
    facts = len(Archive(folder).facts)
    path.write_text(path.read_text() + '{"t": 1800000009.0, "who": "roll')
    assert len(Archive(folder).facts) == facts
    assert broken(folder) == {}
