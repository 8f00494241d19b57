"""Contract messages read back from their JSON form, several times faster than the general parser.

A run's records hold tens of thousands of nested messages that this project wrote itself. The general parser looks at
each field's descriptor anew; here a message type's fields are looked at once, and the message's own constructor does
the rest. What is unusual (Struct and the like) goes through the general parser.
"""

from collections.abc import Callable, Mapping
from datetime import datetime
from functools import cache
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor

from services.common import wire

M = TypeVar("M", bound=wire.Message)
Convert = Callable[[Any], Any]

WIDE = {
    FieldDescriptor.CPPTYPE_INT64,
    FieldDescriptor.CPPTYPE_UINT64,
}
"""Written as strings in JSON."""
REAL = {FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT}
"""Not finite ones are written as strings."""


def parse(row: Mapping[str, Any], make: type[M]) -> M:
    """The message; ParseError names an unknown field or a value of the wrong kind."""
    try:
        return make(**_convert(make.DESCRIPTOR, row))
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise wire.ParseError(f"not a {make.DESCRIPTOR.name}: {error}") from error


def _convert(descriptor: Any, row: Mapping[str, Any]) -> dict[str, Any]:
    plan = _plan(descriptor)
    fields: dict[str, Any] = {}
    for name, value in row.items():
        convert = plan[name]
        fields[name] = value if convert is None else convert(value)
    return fields


@cache
def _plan(descriptor: Any) -> dict[str, Convert | None]:
    return {field.name: _converter(field) for field in descriptor.fields}


def _converter(field: FieldDescriptor) -> Convert | None:
    kind = field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        return _map(_converter(kind.fields_by_name["value"]), _converter(kind.fields_by_name["key"]))
    one = _single(field)
    if one is not None and field.is_repeated:
        return _each(one)
    return one


def _single(field: FieldDescriptor) -> Convert | None:
    """How one value of the field is read; None if it is already what the constructor takes."""
    if field.message_type is not None:
        return _message(field.message_type)
    if field.cpp_type in WIDE:
        return int
    if field.cpp_type in REAL:
        return float
    if field.type == FieldDescriptor.TYPE_BYTES:
        raise TypeError(f"{field.full_name}: bytes are not part of any record")
    return None


def _message(descriptor: Any) -> Convert:
    match descriptor.full_name:
        case "google.protobuf.Timestamp":
            return timestamp
        case "google.protobuf.Duration":
            return lambda text: wire.duration(float(text.removesuffix("s")))
        case "google.protobuf.Struct":
            return lambda value: wire.ParseDict(value, wire.Struct())
    return lambda row: _convert(descriptor, row)


def _each(one: Convert) -> Convert:
    return lambda values: [one(v) for v in values]


def _map(value: Convert | None, key: Convert | None) -> Convert | None:
    if value is None and key is None:
        return None
    same: Convert = lambda v: v  # noqa: E731 - a value that stays as it is
    of_key, of_value = key or same, value or same
    return lambda rows: {of_key(k): of_value(v) for k, v in rows.items()}


def timestamp(text: str) -> wire.Timestamp:
    """A Timestamp of its JSON form, exact to the nanosecond."""
    seconds, nanos = _instant(text)
    return wire.Timestamp(seconds=seconds, nanos=nanos)


def unix_time(text: str) -> float:
    """Seconds since the epoch of a timestamp's JSON form; 0 if empty."""
    if not text:
        return 0.0
    seconds, nanos = _instant(text)
    return seconds + nanos / 1e9


def _instant(text: str) -> tuple[int, int]:
    whole, _, rest = text.removesuffix("Z").partition(".")
    return int(datetime.fromisoformat(f"{whole}+00:00").timestamp()), int(rest.ljust(9, "0")) if rest else 0
