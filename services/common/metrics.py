"""What a service shows Prometheus at /metrics: a registry of its own, and an HTTP server in a thread of its own.

The naive way reads the service's state whenever it is scraped. That state belongs to the event loop, and scrapes come
in other threads: so the loop takes the figures once a second and leaves them, finished, for whoever scrapes. Figures
that have become old are refused, so that a service whose loop hangs shows as down instead of as calm.
"""

import asyncio
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, disable_created_metrics, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.common import log
from services.common.errors import ConfigError
from services.common.supervise import Tasks

_log = log.get(__name__)

DISTRIBUTION = "libra-rl"
PATH = "/metrics"
REFRESH_SECONDS = 1.0
STALE_SECONDS = 10.0
"""Figures older than this are not served."""
CLIENT_SECONDS = 10.0
"""A client that is silent for so long is cut off, so that idle connections do not pile up as threads."""

LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper ends, seconds, for what should be quick: commits, cycles."""
CALL_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper ends, seconds, for tool calls."""

Rows = Mapping[tuple[str, ...], float]
"""Values by label values, in the order of the label names."""

# a counter's time of creation says nothing that process_start_time_seconds does not, and doubles the series
disable_created_metrics()  # type: ignore[no-untyped-call]


def gauge(name: str, text: str, labels: Sequence[str] = (), rows: Rows | None = None) -> Metric:
    """A family of gauges; without rows it is there and has no series."""
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, value in (rows or {}).items():
        family.add_metric(values, value)
    return family


def counter(name: str, text: str, labels: Sequence[str] = (), rows: Rows | None = None) -> Metric:
    """A family of counters that are counted elsewhere; `name` ends with _total."""
    family = CounterMetricFamily(name, text, labels=labels)
    for values, value in (rows or {}).items():
        family.add_metric(values, value)
    return family


def short(resource: str) -> str:
    """A resource name as a label: the run's id, the worker's name, node/index for an accelerator."""
    if resource.startswith("nodes/"):
        return resource.removeprefix("nodes/").replace("/accelerators/", "/")
    return resource.partition("/")[2] or resource


class Exposition:
    """The metrics of one service process.

    `figures` is called on the event loop every REFRESH_SECONDS while something is served; it must be quick. `counted`
    are prometheus_client's own counters and histograms, made with registry=None.
    """

    def __init__(
        self, service: str, figures: Callable[[], Iterable[Metric]], counted: Iterable[Collector] = ()
    ) -> None:
        self.registry = CollectorRegistry()
        self.address = ""
        """host:port that is served; empty while nothing is."""
        self._figures = figures
        self._taken: tuple[Metric, ...] = ()
        self._taken_at = -STALE_SECONDS
        self._tasks = Tasks()
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None
        ProcessCollector(registry=self.registry)
        info = Gauge("libra_build_info", "Always 1.", ["service", "version"], registry=self.registry)
        info.labels(service, _version()).set(1)
        for collector in counted:
            self.registry.register(collector)
        self.registry.register(_Taken(self))

    def refresh(self) -> None:
        """Takes the figures now; on the event loop only."""
        self._taken, self._taken_at = tuple(self._figures()), time.monotonic()

    def newest(self) -> tuple[Metric, ...]:
        """The figures last taken, from any thread; Stale if that is too long ago."""
        age = time.monotonic() - self._taken_at
        if age > STALE_SECONDS:
            raise Stale(
                f"the figures are {age:.0f} s old, at most {STALE_SECONDS:.0f} s is expected: the service hangs"
            )
        return self._taken

    async def serve(self, listen: str) -> str:
        """Serves on host:port (port 0 picks one) until `stop`; returns the bound address. "" serves nothing.

        ConfigError if the address is malformed or cannot be bound.
        """
        if not listen:
            return ""
        self.refresh()
        # a name in the address may have to be looked up
        self._server = server = await asyncio.to_thread(_bind, listen, self.registry)
        self._thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
        self._thread.start()
        self._tasks.start("metrics", self._keep())
        self.address = f"{listen.rpartition(':')[0]}:{server.server_port}"
        _log.info("metrics are served", address=self.address)
        return self.address

    async def stop(self) -> None:
        """Stops serving and closes the port; no effect if nothing is served."""
        await self._tasks.stop()
        server, self._server, self.address = self._server, None, ""
        if server is not None and self._thread is not None:
            await asyncio.to_thread(server.shutdown)
            server.server_close()
            await asyncio.to_thread(self._thread.join)

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_SECONDS)
            self.refresh()


class Stale(Exception):
    """The event loop has taken no figures for too long."""


class _Taken(Collector):
    def __init__(self, exposition: Exposition) -> None:
        self._exposition = exposition

    def describe(self) -> Iterable[Metric]:
        return ()  # or registering would already ask for figures

    def collect(self) -> Iterable[Metric]:
        return self._exposition.newest()


class _Handler(WSGIRequestHandler):
    timeout = CLIENT_SECONDS

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base's name
        """Scrapes are no news."""


class _Server(ThreadingWSGIServer):
    def server_bind(self) -> None:
        # the base would look up the host's full name, which may wait for a name server
        socketserver.TCPServer.server_bind(self)
        host, port = self.server_address[:2]
        self.server_name, self.server_port = str(host), int(port)
        self.setup_environ()

    def handle_error(self, request: Any, client_address: Any) -> None:
        del request
        _log.debug("a scrape was broken off", client=str(client_address), error=repr(sys.exception()))


class _Server6(_Server):
    address_family = socket.AF_INET6


def _bind(listen: str, registry: CollectorRegistry) -> _Server:
    host, _, digits = listen.rpartition(":")
    if not host or not (digits.isascii() and digits.isdigit()) or int(digits) > 65_535:
        raise ConfigError(f"metrics_listen: {listen!r} is no address; expected host:port, e.g. 127.0.0.1:9100")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(digits), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(f"metrics_listen: host {host!r} is unknown: {error}") from None
    family, _, _, _, where = found[0]
    try:
        server = (_Server6 if family == socket.AF_INET6 else _Server)((str(where[0]), int(digits)), _Handler)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(
            f"metrics_listen: cannot listen on {listen} ({reason}); stop what holds the port or configure another one "
            "(0 picks a free one)"
        ) from None
    server.set_app(_app(registry))
    return server


def _app(registry: CollectorRegistry) -> Any:
    metrics = make_wsgi_app(registry)
    plain = [("Content-Type", "text/plain; charset=utf-8")]

    def app(environ: Any, start_response: Any) -> Any:
        if environ["PATH_INFO"] != PATH:
            start_response("404 Not Found", plain)
            return [f"metrics are at {PATH}\n".encode()]
        try:
            return metrics(environ, start_response)
        except Stale as error:
            start_response("503 Service Unavailable", plain)
            return [f"{error}\n".encode()]

    return app


def _version() -> str:
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:  # run from a source tree that is not installed
        return "unknown"
