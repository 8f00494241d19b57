"""What no request may carry, whatever its method: checked once, at the boundary, from the descriptors.

Enum numbers that the contract does not know, numbers that are not finite, durations below zero or above a year, and NUL
characters, which Postgres does not store. Each is INVALID_FIELD with the path of the field.
"""

import math
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from services.common import errors

MAX_DURATION_SECONDS = 366 * 86_400
"""A year: no time that the contract speaks of is longer."""
MAX_TIMESTAMP_SECONDS = 253_402_300_799
"""End of the year 9999."""

_FLOATS = (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT)


def check(message: Message, path: str = "") -> None:
    """INVALID_FIELD if `message` or anything in it is beyond the contract; `path` is put before the field's name."""
    kind = message.DESCRIPTOR.full_name
    if kind == "google.protobuf.Duration":
        _duration(message, path)
    elif kind == "google.protobuf.Timestamp":
        _timestamp(message, path)
    if kind.startswith("google.protobuf."):
        return
    for field, value in message.ListFields():
        where = f"{path}.{field.name}" if path else field.name
        entry = field.message_type
        if entry is not None and entry.GetOptions().map_entry:
            for key, item in value.items():
                _value(entry.fields_by_name["key"], key, where)
                _value(entry.fields_by_name["value"], item, where)
        elif field.is_repeated:
            for number, item in enumerate(value):
                _value(field, item, f"{where}[{number}]")
        else:
            _value(field, value, where)


def _value(field: FieldDescriptor, value: Any, where: str) -> None:
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        check(value, where)
    elif field.enum_type is not None:
        if value not in field.enum_type.values_by_number:
            known = ", ".join(v.name for v in field.enum_type.values[:12])
            raise errors.invalid_field(f"{where}: {value} is not a value of {field.enum_type.name}; known: {known}")
    elif field.type in _FLOATS:
        if not math.isfinite(value):
            raise errors.invalid_field(f"{where}: {value} is not a finite number")
    elif field.type == FieldDescriptor.TYPE_STRING and "\0" in value:
        raise errors.invalid_field(f"{where}: contains a NUL character")


def _duration(message: Any, where: str) -> None:
    if not 0 <= message.seconds <= MAX_DURATION_SECONDS or not 0 <= message.nanos < 1_000_000_000:
        raise errors.invalid_field(f"{where}: {message.seconds} s; expected 0 s to {MAX_DURATION_SECONDS} s")


def _timestamp(message: Any, where: str) -> None:
    if not 0 <= message.seconds <= MAX_TIMESTAMP_SECONDS or not 0 <= message.nanos < 1_000_000_000:
        raise errors.invalid_field(f"{where}: {message.seconds} s after 1970; expected a time up to the year 9999")
