"""gRPC servers: health, reflection, errors with reasons, deadlines required, keepalive, a ready file."""

import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from services.common import log
from services.common.errors import ConfigError, LibraError
from services.common.rpc.channel import MAX_MESSAGE_BYTES
from services.common.rpc.status import rpc_status, to_status

_log = log.get(__name__)

OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.ping_timeout_ms", 5_000),
    # clients ping every 5 s; a stricter minimum would cut idle ones off with too_many_pings
    ("grpc.http2.min_ping_interval_without_data_ms", 2_000),
    ("grpc.so_reuseport", 0),
]

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
AddServicer = Callable[[Any, Any], None]
Check = Callable[[str, Any], None]
"""Method name and request; raises LibraError to refuse it."""


class RunningServer:
    """A started server and its bound address."""

    def __init__(self, server: grpc.aio.Server, address: str, health_servicer: health.aio.HealthServicer) -> None:
        self.server = server
        self.address = address
        self._health = health_servicer

    async def set_serving(self, serving: bool) -> None:
        """Changes what grpc.health.v1 answers for the whole server."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        await self._health.set("", status)

    async def stop(self, grace: float = 1.0) -> None:
        """Stops taking calls; running ones have `grace` seconds."""
        await self._health.enter_graceful_shutdown()
        await self.server.stop(grace)


async def serve(
    servicers: Sequence[tuple[AddServicer, Any]],
    address: str,
    *,
    service_names: Sequence[str],
    ready_file: str | Path | None = None,
    deadline_required: bool = True,
    check: Check | None = None,
) -> RunningServer:
    """Starts a server on host:port (port 0 picks one). ConfigError if the port is taken.

    `service_names` are full names for reflection; `ready_file` receives the bound address once calls are taken; `check`
    sees every request with its method's name before the servicer does.
    """
    server = grpc.aio.server(interceptors=[_Errors(deadline_required, check)], options=OPTIONS)
    for add, servicer in servicers:
        add(servicer, server)
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    reflection.enable_server_reflection((*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    host = address.rpartition(":")[0]
    try:
        port = server.add_insecure_port(address)
    except RuntimeError:
        port = 0
    if port == 0:
        raise ConfigError(
            f"cannot listen on {address}: the port is in use or the address is not of this machine; "
            "stop what holds it or configure another port"
        )
    await server.start()
    running = RunningServer(server, f"{host}:{port}", health_servicer)
    await running.set_serving(True)
    if ready_file:
        write_ready(ready_file, running.address)
    return running


def write_ready(path: str | Path, text: str) -> None:
    """Writes a small file in one step, so that a reader never sees half of it."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(text)
    part.replace(path)


class _Errors(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Turns LibraError into a status with details, anything else into INTERNAL; refuses calls without a deadline."""

    def __init__(self, deadline_required: bool, check: Check | None = None) -> None:
        self._deadline_required = deadline_required
        self._check_request = check

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(details)
        method: str = details.method
        if handler is None or not method.startswith("/libra."):
            return handler
        if handler.unary_unary:
            return grpc.unary_unary_rpc_method_handler(
                self._unary(method, handler.unary_unary), handler.request_deserializer, handler.response_serializer
            )
        if handler.unary_stream:
            return grpc.unary_stream_rpc_method_handler(
                self._stream(method, handler.unary_stream), handler.request_deserializer, handler.response_serializer
            )
        return handler

    def _unary(self, method: str, inner: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
        async def call(request: Any, context: Context) -> Any:
            try:
                self._check(method, request, context)
                return await inner(request, context)
            except LibraError as error:
                await _abort(context, error)
            except Exception as error:  # noqa: BLE001 - the boundary: a defect must reach the log and the caller
                await _abort(context, _internal(method, error))

        return call

    def _stream(self, method: str, inner: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        async def call(request: Any, context: Context) -> Any:
            try:
                self._check(method, request, context)
                async for message in inner(request, context):
                    yield message
            except LibraError as error:
                await _abort(context, error)
            except Exception as error:  # noqa: BLE001 - as above
                await _abort(context, _internal(method, error))

        return call

    def _check(self, method: str, request: Any, context: Context) -> None:
        remaining = context.time_remaining()
        # without a deadline grpc.aio reports none, or one some centuries away
        if self._deadline_required and (remaining is None or remaining > 10 * 365 * 86400):
            raise LibraError("DEADLINE_REQUIRED", f"{method} was called without a deadline; set one")
        if self._check_request is not None:
            self._check_request(method, request)


async def _abort(context: Context, error: LibraError) -> None:
    status = rpc_status.to_status(to_status(error))
    await context.abort(status.code, status.details, status.trailing_metadata)


def _internal(method: str, error: Exception) -> LibraError:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    _log.error("call failed", method=method, error=repr(error), exc_info=error)
    return LibraError("INTERNAL", f"{method}: {type(error).__name__}: {error}")
