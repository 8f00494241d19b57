"""`libra rates`: one command from a profile to the file that the scheduler's planner begins with."""

import json
from pathlib import Path

import pytest

from services.ops.__main__ import main
from services.scheduler import rates
from services.scheduler.core.rates import EngineKind, TrainerKind
from services.simulator import profiles
from services.simulator.steptimes import ModelledEngine
from services.simulator.trainingtimes import ModelledTraining

GIVEN = ["rates", "--profile", "a100-modelled", "--model", "qwen3-14b", "--type", "a100-80gb"]


def test_the_file_says_what_the_profile_says(tmp_path: Path, capsys):
    out = tmp_path / "rates.yaml"
    assert main([*GIVEN, "--out", str(out)]) == 0
    assert f"wrote {out}" in capsys.readouterr().out
    table = rates.read(out)
    hardware, model = profiles.profile("a100-modelled").hardware, profiles.model("qwen3-14b")
    engine, training = ModelledEngine(hardware, model), ModelledTraining(hardware, model)
    assert table.profile == "a100-modelled Qwen3-14B"
    assert {(k.type, k.tp) for k in table.engines} == {("a100-80gb", tp) for tp in (1, 2, 4, 8)}
    assert [k.accelerators for k in table.trainers] == [4, 8], "two cannot hold it"
    for kind, found in table.engines.items():
        assert found.decode_s(16, 65_536) == pytest.approx(engine.decode_s(kind.tp, 16, 65_536), rel=1e-6)
        assert found.kv_tokens == engine.kv_tokens(kind.tp)
        assert found.asleep_bytes == model.weight_bytes
    eight = table.trainers[TrainerKind("a100-80gb", 8)]
    lengths = [4_096] * 64
    got = eight.seconds(2, sum(lengths), sum(n * n for n in lengths))
    assert got == pytest.approx(training.step_s(2, 8, lengths), rel=0.05)
    assert eight.micro_batch_tokens == hardware.operations.training.micro_batch_tokens


def test_kinds_may_be_chosen_and_are_shown_as_json(tmp_path: Path, capsys):
    out = tmp_path / "rates.yaml"
    assert main([*GIVEN, "--tp", "4, 2", "--trainer-accelerators", "8", "--out", str(out), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [e["tp"] for e in shown["engines"]] == [2, 4]
    assert [t["accelerators"] for t in shown["trainers"]] == [8]
    assert shown["file"] == str(out)
    assert set(rates.read(out).engines) == {EngineKind("a100-80gb", 2), EngineKind("a100-80gb", 4)}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--tp", "1,x"], "--tp 1,x: expected numbers of 1 to 1,024"),
        (["--tp", "0"], "--tp 0: expected numbers"),
        (["--trainer-accelerators", "1,2"], "--trainer-accelerators 1,2: a replica of Qwen3-14B needs 4"),
        (["--profile", "nothing"], "no profile 'nothing'"),
        (
            ["--model", "qwen3-32b", "--profile", "a800-paper", "--tp", "1", "--trainer-accelerators", "16"],
            "no such engine holds Qwen3-32B",
        ),
        (["--type", ""], "--type '': expected the name that the nodes report"),
        (["--tp", "3,6"], "--tp 3,6: no such engine holds Qwen3-14B (40 attention heads)"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_written(tmp_path: Path, capsys, more, said):
    out = tmp_path / "rates.yaml"
    assert main([*GIVEN, "--out", str(out), *more]) == 2
    assert said in capsys.readouterr().err
    assert not out.exists()


def test_a_file_is_not_overwritten(tmp_path: Path, capsys):
    out = tmp_path / "rates.yaml"
    out.write_text("mine")
    assert main([*GIVEN, "--out", str(out)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert out.read_text() == "mine"
