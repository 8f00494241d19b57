"""`python -m services.common.rpc.health HOST:PORT...`: asks servers whether they serve; for container health checks.

Runs every few seconds in every container, so it imports nothing but grpc. An address that begins with http:// is
torchft's lighthouse, which has no gRPC health service: its page is asked for instead.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CHECK = "/grpc.health.v1.Health/Check"
EVERYTHING = b""
"""A HealthCheckRequest about the whole server."""
SERVING = b"\x08\x01"
"""A HealthCheckResponse with status SERVING: field 1, varint 1. Read here as bytes, which saves importing protobuf."""
HTTP = "http://"
SESSION = "workers/"
"""How a node agent's ready file begins: it names its session, since an agent takes no calls."""
TIMEOUT_SECONDS = 3.0

_ANY = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}  # noqa: S104 - what a ready file may say; never bound here


def main(argv: Sequence[str] | None = None) -> int:
    """0 if all answer SERVING; 1 with one line on stderr if not; 2 for wrong arguments."""
    parser = argparse.ArgumentParser(prog="python -m services.common.rpc.health", description=__doc__)
    parser.add_argument("addresses", nargs="*", metavar="HOST:PORT", type=_address)
    parser.add_argument("--ready-dir", type=Path, help="ask every service that has left a ready file in this folder")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_SECONDS, help="seconds for all together (%(default)s)")
    arguments = parser.parse_args(argv)
    if not arguments.addresses and arguments.ready_dir is None:
        parser.error("expected addresses, --ready-dir or both")
    if not arguments.timeout > 0:
        parser.error(f"--timeout {arguments.timeout:g}: expected more than 0")
    addresses: list[str] = list(arguments.addresses)
    try:
        if arguments.ready_dir is not None:
            addresses += announced(arguments.ready_dir)
        problems = check(addresses, arguments.timeout)
    except NotReady as error:
        problems = [str(error)]
    if problems:
        sys.stderr.write(f"unhealthy: {'; '.join(problems)}\n")
        return 1
    return 0


class NotReady(Exception):
    """A folder of ready files that names no service, or not in a way that can be asked."""


def announced(folder: Path) -> list[str]:
    """The addresses in a folder of ready files, as they are reached from this machine."""
    try:
        # a name that begins with a dot is a ready file still being written
        files = sorted(f for f in folder.iterdir() if not f.name.startswith("."))
        texts = {f.name: f.read_text() for f in files}
    except OSError as error:
        raise NotReady(f"{error.filename}: {error.strerror}") from None
    if not texts:
        raise NotReady(f"{folder}: no service is ready yet")
    found = []
    for name, text in texts.items():
        if text.startswith(SESSION):
            continue
        try:
            found.append(_address(text.strip()))
        except argparse.ArgumentTypeError as error:
            raise NotReady(f"{folder / name}: {error}") from None
    if not found:
        raise NotReady(f"{folder}: no service takes calls yet")
    return found


def check(addresses: Sequence[str], timeout_s: float) -> list[str]:
    """Asks all; one line for each that does not serve, or does not say so within timeout_s."""
    pages = [a for a in addresses if a.startswith(HTTP)]
    servers = [a for a in addresses if not a.startswith(HTTP)]
    return _check_servers(servers, timeout_s) + [line for page in pages for line in _check_page(page, timeout_s)]


def _check_servers(addresses: Sequence[str], timeout_s: float) -> list[str]:
    if not addresses:
        return []
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # a refused connection is our line to write, not grpc's
    import grpc

    channels: list[Any] = [grpc.insecure_channel(a, options=[("grpc.enable_http_proxy", 0)]) for a in addresses]
    try:
        calls: list[Any] = [channel.unary_unary(CHECK).future(EVERYTHING, timeout=timeout_s) for channel in channels]
        problems = []
        for address, call in zip(addresses, calls, strict=True):
            error = call.exception()
            if isinstance(error, grpc.RpcError):
                problems.append(f"{address}: {call.code().name}: {call.details()}")
            elif error is not None:
                raise error
            elif call.result() != SERVING:
                problems.append(f"{address}: answers, but is not serving")
        return problems
    finally:
        for channel in channels:
            channel.close()


def _check_page(address: str, timeout_s: float) -> list[str]:
    import http.client

    connection = http.client.HTTPConnection(address.removeprefix(HTTP), timeout=timeout_s)
    try:
        connection.request("GET", "/")
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        return [f"{address}: {error}"]
    finally:
        connection.close()
    return [] if status < 500 else [f"{address}: HTTP status {status}"]


def _address(text: str) -> str:
    scheme = HTTP if text.startswith(HTTP) else ""
    host, _, port = text.removeprefix(scheme).rpartition(":")
    if not host or "/" in host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is not HOST:PORT")
    return f"{scheme}{_ANY.get(host, host)}:{port}"


if __name__ == "__main__":
    sys.exit(main())
