"""Every table: all (state, event) pairs either lead to a known state or are refused, and terminal states have no exit."""

import itertools

import pytest

from services.scheduler.core.lifecycle import ALL, IllegalTransition


@pytest.mark.parametrize("lifecycle", ALL, ids=lambda x: x.kind)
def test_pairs_that_are_not_listed_are_errors(lifecycle):
    events = {event for _, event in lifecycle.table}
    for state, event in itertools.product(lifecycle.states, events):
        if (state, event) in lifecycle.table:
            assert lifecycle.next("x", state, event) in lifecycle.states
        else:
            with pytest.raises(IllegalTransition, match=state):
                lifecycle.next("x", state, event)


@pytest.mark.parametrize("lifecycle", ALL, ids=lambda x: x.kind)
def test_terminal_states_are_reachable_and_final(lifecycle):
    assert lifecycle.terminal <= lifecycle.states
    final_by_table = {"COVERED"}  # a rewind may still abandon a covered manifest
    for state, _ in lifecycle.table:
        assert state not in lifecycle.terminal - final_by_table, state
    reached, grown = {lifecycle.initial}, True
    while grown:
        more = {to for (state, _), to in lifecycle.table.items() if state in reached}
        grown = not more <= reached
        reached |= more
    assert reached == lifecycle.states
