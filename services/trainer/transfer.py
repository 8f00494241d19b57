"""How a replica's state reaches a joining one: safetensors over HTTP, only for callers that know the group's secret.

torchft's own transport loads pickles, which would let anyone who reaches the port run code here.
"""

import hashlib
import hmac
import http.client
import http.server
import ipaddress
import json
import secrets
import socketserver
import threading
from collections.abc import Mapping
from datetime import timedelta
from http import HTTPStatus
from typing import Any

import safetensors.numpy
from torchft.checkpointing import CheckpointTransport

from services.common import failpoints, log

_log = log.get(__name__)

SCHEME = "Libra-HMAC"
SOCKET_TIMEOUT_SECONDS = 30.0
OFFER_SECONDS = 10.0
"""Longest wait of a request for the state that it names."""
MAX_STATE_BYTES = 1 << 40


class TransferError(RuntimeError):
    """A peer's state could not be fetched, or is not what its sender said."""


class StateTransport(CheckpointTransport[Any]):  # type: ignore[misc]
    """Serves the newest state on a port of its own. The state is copied when it is offered, so training goes on.

    A request is signed with HMAC-SHA256 over its path (which names the step and a nonce of the serving process). With
    an empty secret a random one is drawn and told with `metadata`, which only the collective's network sees.
    """

    def __init__(self, host: str, secret: bytes = b"") -> None:
        self._shared = secret
        self._secret = secret or secrets.token_bytes(32)
        self._nonce = secrets.token_hex(16)
        self._changed = threading.Condition()
        self._offered: tuple[int, bytes] | None = None
        self._server = _Server((_bound(host), 0), _handler(self))
        self._host, self._port = host, self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True)
        self._thread.start()

    def metadata(self) -> str:
        known = {} if self._shared else {"secret": self._secret.hex()}
        return json.dumps({"host": self._host, "port": self._port, "nonce": self._nonce, **known})

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: Any, timeout: timedelta) -> None:
        del dst_ranks, timeout
        data = encode(state_dict)
        with self._changed:
            self._offered = (step, data)
            self._changed.notify_all()

    def disallow_checkpoint(self) -> None:
        with self._changed:
            self._offered = None

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        del src_rank
        failpoints.hit("trainer.fetch_state")
        peer = json.loads(metadata)
        secret = self._shared or bytes.fromhex(peer.get("secret", ""))
        path = f"/state/{step}/{peer['nonce']}"
        connection = http.client.HTTPConnection(peer["host"], int(peer["port"]), timeout=timeout.total_seconds())
        try:
            connection.request("GET", path, headers={"Authorization": f"{SCHEME} {sign(secret, path)}"})
            answer = connection.getresponse()
            data = answer.read(MAX_STATE_BYTES)
        finally:
            connection.close()
        if answer.status != HTTPStatus.OK:
            raise TransferError(f"the peer at {peer['host']}:{peer['port']} answered {answer.status} for step {step}")
        if answer.getheader("X-Sha256") != hashlib.sha256(data).hexdigest():
            raise TransferError(f"the state of step {step} differs from its hash")
        return decode(data)

    def shutdown(self, wait: bool = True) -> None:
        self._server.shutdown()
        self._server.server_close()
        if wait:
            self._thread.join(timeout=5.0)

    def answer(self, path: str, authorization: str) -> tuple[HTTPStatus, bytes]:
        """The reply to a GET."""
        expected = f"{SCHEME} {sign(self._secret, path)}"
        if not hmac.compare_digest(authorization.encode(), expected.encode()):
            return HTTPStatus.FORBIDDEN, b""
        # a joining replica may ask before this one has copied its state
        with self._changed:
            self._changed.wait_for(lambda: self._offers(path), OFFER_SECONDS)
            if self._offered is None or not self._offers(path):
                return HTTPStatus.NOT_FOUND, b""
            return HTTPStatus.OK, self._offered[1]

    def _offers(self, path: str) -> bool:
        return self._offered is not None and path == f"/state/{self._offered[0]}/{self._nonce}"


def _bound(host: str) -> str:
    """What to listen on for peers that reach this machine as `host`.

    An address is taken as it is. A name may stand for another address where a peer asks than here (a container has one
    on each of its networks), so it means all of them.
    """
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return "0.0.0.0"  # noqa: S104 - requests are signed


def sign(secret: bytes, path: str) -> str:
    """HMAC-SHA256 of a request's path."""
    return hmac.new(secret, path.encode(), hashlib.sha256).hexdigest()


def encode(state: Mapping[str, Any]) -> bytes:
    """A state as torchft hands it over, {"user": {key: {"arrays", "counter"}}, "torchft": ...}, as one file."""
    (key, user), *more = state["user"].items()
    assert not more, "one state is registered"
    meta = {"key": key, "counter": str(user["counter"]), "torchft": json.dumps(state["torchft"])}
    data: bytes = safetensors.numpy.save(dict(user["arrays"]), metadata=meta)
    return data


def decode(data: bytes) -> dict[str, Any]:
    """The reverse of `encode`."""
    length = int.from_bytes(data[:8], "little")
    meta = json.loads(data[8 : 8 + length])["__metadata__"]
    user = {"arrays": safetensors.numpy.load(data), "counter": int(meta["counter"])}
    return {"user": {meta["key"]: user}, "torchft": json.loads(meta["torchft"])}


class _Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def server_bind(self) -> None:
        # HTTPServer's own asks DNS for this machine's name, which can take long where there is none
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        del request
        _log.warning("a state request broke off", peer=str(client_address))


def _handler(transport: StateTransport) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        timeout = SOCKET_TIMEOUT_SECONDS

        def do_GET(self) -> None:
            status, body = transport.answer(self.path, self.headers.get("Authorization", ""))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("X-Sha256", hashlib.sha256(body).hexdigest())
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it so
            del format, args

    return Handler
