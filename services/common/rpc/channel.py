"""Client channels: keepalive that notices a frozen peer, bounded messages, no retries behind our back."""

import grpc
import grpc.aio

MAX_MESSAGE_BYTES = 4 << 20
MAX_ANSWER_BYTES = 3 << 20
"""Where an answer that could be larger ends, the rest in the next one: a message, less room for its other fields."""
KEEPALIVE_MS = 5_000
KEEPALIVE_TIMEOUT_MS = 3_000

OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    # keepalive alone notices a frozen peer after about a minute
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_retries", 0),
    # a restarted peer must be found soon
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # each channel its own connection: one with another's backoff or a closed one is never handed to us
    ("grpc.use_local_subchannel_pool", 1),
]


def connect(address: str) -> grpc.aio.Channel:
    """An insecure aio channel to host:port, with the project's options."""
    return grpc.aio.insecure_channel(address, options=OPTIONS)


def connect_sync(address: str) -> grpc.Channel:
    """The same for code without an event loop."""
    return grpc.insecure_channel(address, options=OPTIONS)
