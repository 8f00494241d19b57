"""The health probe of containers: what it asks, and the exit code that the engine acts on."""

import asyncio
import socket
import subprocess
import sys

import pytest

from services.common.rpc import health
from services.common.rpc.server import serve


@pytest.fixture
async def server():
    running = await serve([], "127.0.0.1:0", service_names=[])
    yield running
    await running.stop(0)


@pytest.fixture
def closed():
    """An address where nobody listens: bound, so that nobody else gets it."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


async def probe(*arguments):
    return await asyncio.to_thread(health.main, [str(a) for a in arguments])


async def test_serving(server, capsys):
    assert await probe(server.address) == 0
    assert capsys.readouterr() == ("", "")


async def test_not_serving(server, capsys):
    await server.set_serving(False)
    assert await probe(server.address) == 1
    assert capsys.readouterr().err == f"unhealthy: {server.address}: answers, but is not serving\n"


async def test_nobody_listens(server, closed, capsys):
    assert await probe(server.address, closed) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"unhealthy: {closed}: UNAVAILABLE: ")
    assert error.count("\n") == 1


async def test_a_server_that_says_nothing_costs_the_timeout_only(capsys):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        assert await probe(f"127.0.0.1:{silent.getsockname()[1]}", "--timeout", "0.2") == 1
    assert "DEADLINE_EXCEEDED" in capsys.readouterr().err


async def test_ready_dir_names_all_services(server, closed, tmp_path, capsys):
    port = server.address.rpartition(":")[2]
    (tmp_path / "one").write_text(f"0.0.0.0:{port}")
    (tmp_path / ".two.17").write_text("half an addr")
    assert await probe("--ready-dir", tmp_path) == 0
    (tmp_path / "two").write_text(closed)
    assert await probe("--ready-dir", tmp_path) == 1
    assert closed in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "nonsense", "127.0.0.1:", "127.0.0.1:0", "127.0.0.1:70000"])
async def test_ready_file_without_an_address(text, tmp_path, capsys):
    (tmp_path / "one").write_text(text)
    assert await probe("--ready-dir", tmp_path) == 1
    assert f"{tmp_path / 'one'}: {text!r} is not HOST:PORT" in capsys.readouterr().err


async def test_ready_dir_without_services(tmp_path, capsys):
    assert await probe("--ready-dir", tmp_path) == 1
    assert await probe("--ready-dir", tmp_path / "absent") == 1
    error = capsys.readouterr().err
    assert "no service is ready yet" in error
    assert "No such file" in error


async def test_lighthouse_is_asked_for_its_page(closed, tmp_path, capsys):
    answers = [b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 500 No\r\n\r\n"]

    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answers.pop(0))
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1") as page:
        (tmp_path / "lighthouse").write_text(f"http://0.0.0.0:{page.sockets[0].getsockname()[1]}")
        assert await probe("--ready-dir", tmp_path) == 0
        assert await probe("--ready-dir", tmp_path) == 1
        assert "HTTP status 500" in capsys.readouterr().err
        assert await probe(f"http://{closed}") == 1
        assert "refused" in capsys.readouterr().err


@pytest.mark.parametrize("address", ["[::]:7070", "0.0.0.0:7070", "scheduler:7070"])
def test_addresses_as_reached_from_here(address, tmp_path):
    (tmp_path / "one").write_text(f"{address}\n")
    reached = {"[::]:7070": "[::1]:7070", "0.0.0.0:7070": "127.0.0.1:7070"}.get(address, address)
    assert health.announced(tmp_path) == [reached]


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["127.0.0.1:7070", "--timeout", "0"], ["--no-such"]])
def test_wrong_arguments(arguments):
    with pytest.raises(SystemExit) as ended:
        health.main(arguments)
    assert ended.value.code == 2


def test_light():
    """It runs in every container all the time: neither protobuf nor anything else of Libra's is read for it."""
    program = (
        "import sys; from services.common.rpc import health; health.check(['127.0.0.1:1'], 1); "
        "print([m for m in sys.modules if m.split('.')[0] in ('google', 'yaml', 'pydantic', 'numpy', 'structlog')])"
    )
    result = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (0, "[]\n"), result.stderr
