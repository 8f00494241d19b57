"""A machine with several addresses uses the one from which the others are reached."""

import socket

import pytest

from services.trainer import interfaces


@pytest.mark.parametrize("form", ["{}:{}", "http://{}:{}"])
def test_the_loopback_reaches_the_loopback(form):
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        address = form.format("127.0.0.1", held.getsockname()[1])
        assert interfaces.towards(address) == "127.0.0.1"


def test_an_interface_is_found_by_its_address():
    name = interfaces.interface("127.0.0.1")
    assert name in [n for _, n in socket.if_nameindex()]
    assert interfaces.interface("203.0.113.9") == ""
