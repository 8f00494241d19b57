"""The wire contract as one flat namespace: every message, enum value, stub and servicer base of libra.v1.

The only door to the generated code outside the services' api modules, so that a change of the contract's files is a
change of one import list.
"""
# ruff: noqa: F403, F401

import math

from google.protobuf.duration_pb2 import Duration
from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.json_format import MessageToDict, MessageToJson, Parse, ParseDict, ParseError
from google.protobuf.message import DecodeError, Message
from google.protobuf.struct_pb2 import Struct
from google.protobuf.timestamp_pb2 import Timestamp
from libra.v1.accelerator_pb2 import *
from libra.v1.admin_service_pb2 import *
from libra.v1.admin_service_pb2_grpc import *
from libra.v1.batch_pb2 import *
from libra.v1.command_pb2 import *
from libra.v1.common_pb2 import *
from libra.v1.errors_pb2 import *
from libra.v1.event_pb2 import *
from libra.v1.fleet_service_pb2 import *
from libra.v1.fleet_service_pb2_grpc import *
from libra.v1.placement_service_pb2 import *
from libra.v1.placement_service_pb2_grpc import *
from libra.v1.plan_pb2 import *
from libra.v1.replica_pb2 import *
from libra.v1.rollout_service_pb2 import *
from libra.v1.rollout_service_pb2_grpc import *
from libra.v1.run_pb2 import *
from libra.v1.toolenv_service_pb2 import *
from libra.v1.toolenv_service_pb2_grpc import *
from libra.v1.trainer_service_pb2 import *
from libra.v1.trainer_service_pb2_grpc import *
from libra.v1.trajectory_pb2 import *
from libra.v1.trajectory_service_pb2 import *
from libra.v1.trajectory_service_pb2_grpc import *
from libra.v1.weights_pb2 import *
from libra.v1.worker_pb2 import *

DELTA_LIMITS = {
    "changed": 1_024, "removed": 1_024, "replicas": 64, "progress": 256, "ends": 256, "results": 256,
    "observations": 64, "incidents": 16,
}  # fmt: skip
"""Most entries of each part of one report's Delta, as worker.proto says."""


def duration(seconds: float) -> Duration:
    """Makes a Duration of seconds; negative values become zero, since a wait that is over is over."""
    nanos = max(0, math.floor(seconds * 1e9))
    return Duration(seconds=nanos // 1_000_000_000, nanos=nanos % 1_000_000_000)


def seconds(value: Duration) -> float:
    """The Duration in seconds."""
    return value.seconds + value.nanos / 1e9


def timestamp(unix_seconds: float) -> Timestamp:
    """Makes a Timestamp of seconds since the epoch; 0 stays unset."""
    nanos = math.floor(unix_seconds * 1e9)
    return Timestamp(seconds=nanos // 1_000_000_000, nanos=nanos % 1_000_000_000)
