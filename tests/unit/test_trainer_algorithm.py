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
        ({"min_lr_ratio": 2}, "min_lr_ratio: expected 0.0 to 1.0"),
        ({"decay_steps": -1}, "decay_steps: expected 0"),
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


def test_the_rate_stays_where_nothing_else_is_said():
    assert {algorithm.Grpo(learning_rate=0.25).rate_of(step) for step in (1, 10, 10_000)} == {0.25}


def test_the_rate_rises_stays_and_falls():
    grpo = parse({"learning_rate": 0.5, "warmup_steps": 2, "decay_after": 4, "decay_steps": 4, "min_lr_ratio": 0.2})
    assert [round(grpo.rate_of(step), 9) for step in range(1, 11)] == [
        0.25, 0.5, 0.5, 0.5, 0.4, 0.3, 0.2, 0.1, 0.1, 0.1,
    ]  # fmt: skip
