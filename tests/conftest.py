"""Fixtures for all tests."""

from hypothesis import Phase, settings

from tests.support.postgres import postgres_server, postgres_url

__all__ = ["postgres_server", "postgres_url"]

# the same examples in every run, however slow the machine is
settings.register_profile(
    "steady", deadline=None, derandomize=True, max_examples=60, phases=set(Phase) - {Phase.explain}
)
settings.load_profile("steady")
