"""What is learnt of a job: one broken report must not decide what a step is believed to ask for."""

import pytest

from services.scheduler.core.evidence import Consumed, Evidence, Rules, Trained
from services.scheduler.core.rates import EngineKind, EngineRates, TrainerKind, TrainerRates

ENGINE, TRAINER = EngineKind("a", 1), TrainerKind("a", 1)
RATES = EngineRates(0.01, 1e-5, 1e-7, 200_000.0)
# the one has a long call, the other many tokens: at 0.01 s a token the call takes longer
CALLS, TALKS = Consumed(10, 100, 200, 60.0), Consumed(10, 1_000, 1_010, 0.0)


def learnt(reports) -> Evidence:
    evidence = Evidence({ENGINE: RATES}, {TRAINER: TrainerRates(1e-3)}, Rules(1, 32_768.0))
    for kind, seconds in reports:
        evidence.load(kind, 4.0, 1_000.0, seconds)
    evidence.step(Trained([CALLS, TALKS], 2, TRAINER, 1, 1.0))
    return evidence


@pytest.mark.parametrize("absurd", [1e9, 1e300, 1.7e308])
@pytest.mark.filterwarnings("error")
def test_an_absurd_time_of_a_token_is_outweighed_by_a_few_reports(absurd):
    honest = [(ENGINE, 0.01)] * 10
    assert learnt(honest).demand().tail.tool_seconds == pytest.approx(60.0)
    assert learnt([(ENGINE, absurd), *honest]).demand().tail.tool_seconds == pytest.approx(60.0)


def test_engines_of_which_no_rates_are_known_do_not_say_how_long_a_token_takes():
    assert learnt([(EngineKind("b", 1), 1e6)]).demand() == learnt([]).demand()
