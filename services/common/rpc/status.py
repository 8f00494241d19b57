"""Errors on the wire: google.rpc.Status with ErrorInfo (domain "libra", stable reason) and RetryInfo."""

from typing import Any

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from services.common import wire
from services.common.errors import LibraError

DOMAIN = "libra"
MAX_MESSAGE = 2_048
MAX_METADATA = 256


def to_status(error: LibraError) -> status_pb2.Status:
    """The wire form of an error; metadata `retry_after_s` becomes RetryInfo."""
    # names in it may be a caller's, of any length; status and details travel in trailers, which are small
    metadata = {key: value[:MAX_METADATA] for key, value in error.metadata.items()}
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata)
    details = [_pack(info)]
    if "retry_after_s" in error.metadata:
        delay = wire.duration(float(error.metadata["retry_after_s"]))
        details.append(_pack(error_details_pb2.RetryInfo(retry_delay=delay)))
    return status_pb2.Status(code=error.status.value[0], message=error.message[:MAX_MESSAGE], details=details)


def from_rpc_error(error: grpc.RpcError) -> LibraError:
    """The error that a server of ours sent, or the transport's own word under its status name."""
    call: Any = error
    code: grpc.StatusCode = call.code()
    message: str = call.details() or code.name
    status = None
    for key, value in call.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            status = status_pb2.Status.FromString(value)
    for detail in status.details if status else ():
        info = error_details_pb2.ErrorInfo()
        if detail.Is(info.DESCRIPTOR) and detail.Unpack(info) and info.domain == DOMAIN:
            return LibraError(info.reason, message, code, **dict(info.metadata))
    return LibraError(code.name, message, code)


def _pack(message: wire.Message) -> AnyMessage:
    packed = AnyMessage()
    packed.Pack(message)
    return packed


__all__ = ["code_pb2", "from_rpc_error", "rpc_status", "to_status"]
