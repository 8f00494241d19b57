"""How state reaches a joining replica: only to those who know the secret, whole, without pickle."""

import http.client
import json
import threading
from datetime import timedelta

import numpy as np
import pytest

from services.trainer.transfer import StateTransport, TransferError, decode, encode

TIMEOUT = timedelta(seconds=10)
STATE = {
    "user": {"default": {"arrays": {"w": np.arange(6.0).reshape(2, 3), "n": np.array(3)}, "counter": (1 << 32) + 7}},
    "torchft": {"step": 7, "batches_committed": 9},
}


@pytest.fixture
def transports():
    made = []

    def make(secret):
        made.append(StateTransport("127.0.0.1", secret))
        return made[-1]

    yield make
    for transport in made:
        transport.shutdown()


def test_state_survives_the_way():
    found = decode(encode(STATE))
    assert found["torchft"] == STATE["torchft"]
    user = found["user"]["default"]
    assert user["counter"] == (1 << 32) + 7
    assert np.array_equal(user["arrays"]["w"], STATE["user"]["default"]["arrays"]["w"])
    assert user["arrays"]["n"].shape == ()


@pytest.mark.parametrize("secret", [b"", b"shared among the trainers"])
def test_a_peer_gets_the_state_of_the_step_it_asks_for(transports, secret):
    giver, taker = transports(secret), transports(secret)
    giver.send_checkpoint([1], 7, STATE, TIMEOUT)
    found = taker.recv_checkpoint(0, giver.metadata(), 7, TIMEOUT)
    assert found["user"]["default"]["counter"] == (1 << 32) + 7


def test_a_peer_that_asks_too_early_is_answered_once_the_state_is_there(transports):
    giver, taker = transports(b"s" * 16), transports(b"s" * 16)
    asked = threading.Event()
    answer = giver.answer

    def note(path, authorization):
        asked.set()
        return answer(path, authorization)

    giver.answer = note
    found = []
    thread = threading.Thread(target=lambda: found.append(taker.recv_checkpoint(0, giver.metadata(), 7, TIMEOUT)))
    thread.start()
    assert asked.wait(10)
    giver.send_checkpoint([1], 7, STATE, TIMEOUT)
    thread.join(10)
    assert found[0]["torchft"]["step"] == 7


def test_a_name_is_served_on_every_address_that_it_may_stand_for(transports):
    giver = StateTransport("a-name-that-peers-resolve-otherwise", b"s" * 16)
    try:
        giver.send_checkpoint([1], 7, STATE, TIMEOUT)
        peer = json.loads(giver.metadata())
        assert peer["host"] == "a-name-that-peers-resolve-otherwise"
        for address in ("127.0.0.1", "127.0.0.2"):
            seen = json.dumps(peer | {"host": address})
            assert transports(b"s" * 16).recv_checkpoint(0, seen, 7, TIMEOUT)["torchft"]["step"] == 7
    finally:
        giver.shutdown()


def test_nobody_without_the_secret_gets_anything(transports):
    giver, stranger = transports(b"the right secret"), transports(b"a wrong secret ..")
    giver.send_checkpoint([1], 7, STATE, TIMEOUT)
    with pytest.raises(TransferError, match="answered 403"):
        stranger.recv_checkpoint(0, giver.metadata(), 7, TIMEOUT)
    peer = json.loads(giver.metadata())
    assert "secret" not in peer
    connection = http.client.HTTPConnection(peer["host"], peer["port"], timeout=10)
    connection.request("GET", f"/state/7/{peer['nonce']}")
    assert connection.getresponse().status == 403
    connection.close()
