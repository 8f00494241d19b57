"""Settings of the algorithm: defaults, types, unknown keys."""

import pytest

from services.common import wire
from services.common.errors import LibraError
from services.trainer import algorithm


def parse(settings, name="grpo"):
    message = wire.Algorithm(name=name)
    message.settings.update(settings)
    return algorithm.parse(message)


def test_settings_are_taken_over_with_defaults():
    grpo = parse({"learning_rate": 0.001, "betas": [0.8, 0.95], "checkpoint_every": 5, "advantage_std": False})
    assert (grpo.learning_rate, grpo.beta1, grpo.beta2, grpo.checkpoint_every) == (0.001, 0.8, 0.95, 5)
    assert grpo.advantage_std is False
    assert grpo.clip_high == algorithm.Grpo().clip_high


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"learning_rat": 1e-3}, "did you mean 'learning_rate'"),
        ({"learning_rate": "fast"}, "learning_rate: expected a finite number"),
        ({"learning_rate": -1}, "learning_rate: expected 0.0 to 1.0"),
        ({"checkpoint_every": 1.5}, "checkpoint_every: expected a whole number"),
        ({"checkpoint_every": 0}, "checkpoint_every: expected 1"),
        ({"advantage_std": 1}, "advantage_std: expected true or false"),
        ({"betas": [0.9]}, "betas: expected a list of 2"),
        ({"beta1": 0.9}, "did you mean 'betas'"),
    ],
)
def test_case_53_a_bad_setting_is_named_with_what_was_expected(settings, expected):
    with pytest.raises(LibraError) as caught:
        parse(settings)
    assert caught.value.reason == "INVALID_FIELD"
    assert expected in caught.value.message


def test_an_unknown_algorithm_is_refused():
    with pytest.raises(LibraError, match="it knows 'grpo'"):
        parse({}, name="ppo")
