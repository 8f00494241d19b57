"""The session table: epochs, call ids, expiry, request ids."""

import itertools

import pytest

from services.common.clock import ManualClock
from services.common.errors import LibraError
from services.toolenv import sessions as module
from services.toolenv.sessions import MAX_CALLS, Sessions


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def table(clock):
    numbers = itertools.count()
    return Sessions(3, 100.0, 10.0, now=clock.monotonic, new_name=lambda: f"s-{next(numbers)}")


def refused(reason, call, *arguments):
    with pytest.raises(LibraError) as caught:
        call(*arguments)
    assert caught.value.reason == reason
    return caught.value


def test_the_same_request_id_gives_the_same_session(table):
    first, new = table.open("r1", b"task", 1, 5)
    assert new
    assert table.open("r1", b"task", 1, 5) == (first, False)
    assert table.open("r2", b"task", 1, 5)[0].name != first.name
    assert len(table) == 2


def test_a_request_id_with_another_task_is_refused(table):
    table.open("r1", b"task", 1, 5)
    refused("REQUEST_ID_REUSED", table.open, "r1", b"other", 1, 5)


def test_a_repeated_open_leaves_the_epoch_alone(table):
    session, _ = table.open("r1", b"task", 1, 5)
    table.attach(session.name, 7)
    assert table.open("r1", b"task", 1, 5)[0].epoch == 7
    assert table.open("r1", b"task", 9, 5)[0].epoch == 7


def test_a_lower_epoch_is_refused_everywhere(table):
    session, _ = table.open("r1", b"", 2, 5)
    refused("STALE_FENCE", table.attach, session.name, 1)
    assert table.attach(session.name, 2).epoch == 2
    assert table.attach(session.name, 5).epoch == 5
    refused("STALE_FENCE", table.attach, session.name, 4)
    refused("STALE_FENCE", table.begin, session.name, 4, "4-0", b"")
    refused("STALE_FENCE", table.user, session.name, 4)
    refused("STALE_FENCE", table.renew, session.name, 4, 5)
    refused("STALE_FENCE", table.close, session.name, 4)
    assert not session.calls, "a refused call has not begun"


def test_calls_need_the_stored_epoch_exactly(table):
    session, _ = table.open("r1", b"", 2, 5)
    error = refused("STALE_FENCE", table.begin, session.name, 3, "3-0", b"")
    assert error.metadata["expected"] == "2"
    table.renew(session.name, 3, 5)
    assert session.epoch == 2, "only attach raises it"


def test_a_call_begins_once(table):
    session, _ = table.open("r1", b"", 1, 5)
    call, new = table.begin(session.name, 1, "1-0", b"add 1 2")
    assert new
    assert call.result is None
    call.result = "3"
    again, new = table.begin(session.name, 1, "1-0", b"add 1 2")
    assert (again.result, new) == ("3", False)
    assert table.call(session.name, "1-0") is call


def test_a_known_call_id_with_other_arguments_is_refused(table):
    session, _ = table.open("r1", b"", 1, 5)
    table.begin(session.name, 1, "1-0", b"add 1 2")
    refused("INVALID_FIELD", table.begin, session.name, 1, "1-0", b"add 1 3")


def test_an_unknown_call_is_not_found(table):
    session, _ = table.open("r1", b"", 1, 5)
    refused("NOT_FOUND", table.call, session.name, "1-0")


def test_calls_are_bounded_and_none_is_forgotten(table):
    session, _ = table.open("r1", b"", 1, 5)
    for number in range(MAX_CALLS):
        table.begin(session.name, 1, f"1-{number}", b"")
    refused("CAPACITY", table.begin, session.name, 1, "one-more", b"")
    assert not table.begin(session.name, 1, "1-0", b"")[1]


def test_sessions_are_bounded(table):
    opened = [table.open(f"r{n}", b"", 1, 5)[0] for n in range(3)]
    error = refused("CAPACITY", table.open, "r9", b"", 1, 5)
    assert float(error.metadata["retry_after_s"]) > 0
    assert not table.open("r0", b"", 1, 5)[1], "a repeated request needs no place"
    table.close(opened[0].name, 1)
    assert table.open("r9", b"", 1, 5)[1]


def test_expiry(table, clock):
    session, _ = table.open("r1", b"", 1, 5)
    clock.advance(4.9)
    table.attach(session.name, 2)
    clock.advance(0.1)
    refused("SESSION_EXPIRED", table.attach, session.name, 3)
    assert table.expire() == [session]
    assert table.expire() == []
    refused("SESSION_EXPIRED", table.attach, session.name, 3)
    refused("SESSION_EXPIRED", table.open, "r1", b"", 1, 5)
    assert table.close(session.name, 3) is None, "closing what is over is no error"


def test_renewals_end_with_the_longest_life(table, clock):
    session, _ = table.open("r1", b"", 1, 0)
    assert table.left(session) == 10.0, "no wish gives the default"
    for _ in range(12):
        clock.advance(9.0)
        if table.left(session) == 0:
            break
        table.renew(session.name, 1, 1_000)
    assert clock.monotonic() - 1_000_000.0 == 108.0, "opened at 0, may live for 100"
    assert table.expire() == [session]


def test_a_wish_longer_than_the_longest_life_is_cut(table):
    assert table.left(table.open("r1", b"", 1, 1e9)[0]) == 100.0


def test_a_renewal_never_shortens(table):
    session, _ = table.open("r1", b"", 1, 50)
    table.renew(session.name, 1, 1)
    assert table.left(session) == 50


def test_closing(table):
    session, _ = table.open("r1", b"", 3, 5)
    assert table.close(session.name, 4) is session
    assert table.close(session.name, 4) is None
    assert table.close("never-was", 1) is None
    refused("NOT_FOUND", table.find, session.name)
    refused("NOT_FOUND", table.open, "r1", b"", 3, 5)
    refused("NOT_FOUND", table.find, "never-was")


def test_what_did_not_start_may_be_tried_again(table):
    session, _ = table.open("r1", b"bad", 1, 5)
    table.abandon(session)
    again, new = table.open("r1", b"good", 1, 5)
    assert new
    assert again.name != session.name


def test_ended_sessions_are_forgotten_in_time_and_in_number(table, clock, monkeypatch):
    session, _ = table.open("r1", b"", 1, 5)
    table.close(session.name, 1)
    clock.advance(100.0)
    assert table.open("r1", b"", 1, 5)[1], "nobody can hold a request that is older than the longest life"
    monkeypatch.setattr(module, "MAX_ENDED", 5)
    for number in range(20):
        table.close(table.open(f"q{number}", b"", 1, 5)[0].name, 1)
    table.expire()
    assert len(table._ended) == 5
    assert len(table._by_request) == 5 + len(table)
