"""The fast reader of the contract's JSON form agrees with the general one."""

import pytest

from services.common import wire
from services.ops import jsonform
from services.ops.records import line
from tests.support.records import TinyRun

MESSAGES = [
    wire.Run(
        name="runs/a", kind=wire.RUN_KIND_EVAL, seed=-5, labels={"a": "b"}, limits=wire.TrajectoryLimits(max_turns=3),
        no_progress_timeout=wire.duration(1.25), create_time=wire.timestamp(1_800_000_000.5),
        sampling=wire.SamplingParams(temperature=0.0, stop=["x"]),
        policies=[wire.Policy(pinned=wire.VersionRef(lineage=1 << 40))],
    ),
    wire.Reassignment(reason=wire.Reason(code="A", numbers={"gain": 1.5, "none": 0.0})),
    wire.Worker(
        load=wire.Load(
            trainer=wire.TrainerLoad(phase_seconds=[0.0, 2.5], engine_mismatch={"r": 0.25}, trained_tokens=1 << 33)
        )
    ),
    wire.Trajectory(sequences=[wire.Sequence(parent=0), wire.Sequence(segments=[wire.Segment(tokens=7)])]),
    wire.ManifestMember(reward=wire.Reward(value=0.0)),
    wire.Reason(numbers={"gap": float("inf")}),
]  # fmt: skip


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: m.DESCRIPTOR.name)
def test_reads_what_the_general_parser_reads(message):
    assert jsonform.parse(line(message), type(message)) == message


def test_settings_of_an_algorithm_survive():
    run = wire.Run(algorithm=wire.Algorithm(name="grpo"))
    run.algorithm.settings.update({"learning_rate": 3e-4, "betas": [0.9, 0.99]})
    assert jsonform.parse(line(run), wire.Run) == run


def test_every_record_of_a_run_reads_the_same(tmp_path):
    run = TinyRun(tmp_path / "tiny", with_model=False).build()
    for message in [*run.events, *run.trajectories, *run.reassignments()]:
        assert jsonform.parse(line(message), type(message)) == message


@pytest.mark.parametrize("row", [{"nmae": "x"}, {"attempt": "many"}, {"sequences": 3}, {"state": "NO_SUCH_STATE"}])
def test_a_wrong_field_is_a_parse_error_as_with_the_general_parser(row):
    with pytest.raises(wire.ParseError):
        wire.ParseDict(row, wire.Trajectory())
    with pytest.raises(wire.ParseError, match="not a Trajectory"):
        jsonform.parse(row, wire.Trajectory)
