"""The planner's tables from a profile say what the profile's own times say."""

import pytest

from services.simulator import priors, profiles
from services.simulator.steptimes import ModelledEngine
from services.simulator.trainingtimes import ModelledTraining


@pytest.fixture(params=["a100-modelled", "a800-paper"])
def hardware(request):
    return profiles.profile(request.param).hardware


def test_decoding_of_a_dense_model_is_exact(hardware):
    times = ModelledEngine(hardware, profiles.model("qwen3-14b"))
    found = priors.engine_rates(times, "a")
    assert [k.tp for k in found] == [1, 2, 4, 8]
    for kind, rates in found.items():
        assert rates.kv_tokens == times.kv_tokens(kind.tp)
        for running, context in ((1.0, 100.0), (7.0, 20_000.0), (200.0, 900_000.0)):
            assert rates.decode_s(running, context) == pytest.approx(
                times.decode_s(kind.tp, running, context), rel=1e-6
            )


def test_decoding_with_experts_is_a_line_near_it(hardware):
    """Experts touched saturate with the batch; a line is off by up to a half between the loads it was fitted to."""
    times = ModelledEngine(hardware, profiles.model("qwen3-30b-a3b"))
    errors = [
        abs(rates.decode_s(n, n * 4_000) / times.decode_s(kind.tp, n, n * 4_000) - 1)
        for kind, rates in priors.engine_rates(times, "a").items()
        for n in (1.0, 4.0, 16.0, 64.0, 128.0)
    ]
    assert max(errors) < 0.5
    assert sorted(errors)[len(errors) // 2] < 0.2


def test_prefill_is_right_around_typical_sizes(hardware):
    times = ModelledEngine(hardware, profiles.model("qwen3-14b"))
    for kind, rates in priors.engine_rates(times, "a").items():
        for new, cached in ((1_024.0, 4_096.0), (8_192.0, 0.0)):
            assert rates.prefill_s * new == pytest.approx(times.prefill_s(kind.tp, new, cached), rel=0.35)


def test_degrees_that_cannot_hold_the_model_are_left_out():
    hardware = profiles.profile("a800-paper").hardware
    found = priors.engine_rates(ModelledEngine(hardware, profiles.model("qwen3-32b")), "a")
    assert [k.tp for k in found] == [2, 4, 8]


@pytest.mark.parametrize("replicas", [1, 3, 6])
def test_training_steps_are_those_of_the_profile(hardware, replicas):
    times = ModelledTraining(hardware, profiles.model("qwen3-14b"))
    found = priors.trainer_rates(times, "a", (2, 4, 8), 40_960.0)
    assert [k.accelerators for k in found] == [4, 8], "two are too few"
    lengths = [1_000 + 37 * i for i in range(510)]
    for kind, rates in found.items():
        got = rates.seconds(replicas, sum(lengths), sum(n * n for n in lengths))
        assert got == pytest.approx(times.step_s(replicas, kind.accelerators, lengths), rel=0.04)
