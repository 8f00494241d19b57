"""Dataclasses to rows and back, for all nouns alike."""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, is_dataclass
from operator import attrgetter, itemgetter
from typing import Any, Generic, TypeVar, get_args, get_origin, get_type_hints

import sqlalchemy as sa

E = TypeVar("E")
Row = tuple[Any, ...]
Key = tuple[Any, ...]
Codec = Callable[[Any], Any]

_dumps = json.JSONEncoder(separators=(",", ":")).encode


def persisted(cls: type[Any], unsaved: Iterable[str] = ()) -> tuple[str, ...]:
    """Fields that the database keeps: not the leader's monotonic times, and not those in `unsaved`."""
    return tuple(f.name for f in fields(cls) if not f.name.endswith("_at") and f.name not in unsaved)


class Mapping(Generic[E]):
    """How instances of one dataclass become rows of one table.

    `key` identifies a row. A row put again replaces the old one except for the columns in `fixed`, which never change
    after creation and so cost nothing (their indexes stay untouched); with `once`, a second row with the same key is
    an error.
    """

    def __init__(
        self,
        cls: type[E],
        table: sa.Table,
        key: str = "name",
        *,
        fixed: str = "",
        unsaved: Iterable[str] = (),
        once: bool = False,
    ) -> None:
        self.cls = cls
        self.table = table
        self.names = persisted(cls, unsaved)
        self.key = tuple(key.split())
        self.once = once
        self.columns: list[sa.Column[Any]] = [table.c[name] for name in self.names]
        self._changing = tuple(n for n in self.names if n not in self.key and n not in fixed.split())
        # arguments by position are twice as fast, where the fields that are kept come first
        self._first = self.names == tuple(f.name for f in fields(cls))[: len(self.names)]  # type: ignore[arg-type]
        self._get = attrgetter(*self.names)
        self._key = itemgetter(*(self.names.index(k) for k in self.key))
        hints = get_type_hints(cls)
        self._text = tuple(i for i, n in enumerate(self.names) if hints[n] is str)
        coded = [
            (i, *_codec(hints[n])) for i, n in enumerate(self.names) if get_origin(hints[n]) in (tuple, list, dict)
        ]
        self._encoders = tuple(
            (i, encode, "{}" if get_origin(hints[self.names[i]]) is dict else "[]") for i, encode, _ in coded
        )
        self._decoders = tuple((i, decode) for i, _, decode in coded)

    def to_row(self, entity: E) -> Row:
        """The entity's present values in the order of `names`, JSON columns as text."""
        row = list(self._get(entity))
        for i, encode, empty in self._encoders:
            row[i] = encode(row[i]) if row[i] else empty
        for i in self._text:
            if "\0" in row[i]:  # Postgres has no such character; one from a caller must not stop a commit
                row[i] = row[i].replace("\0", "\N{REPLACEMENT CHARACTER}")
        return tuple(row)

    def key_of(self, row: Row) -> Key:
        """The values that identify a row."""
        key = self._key(row)
        return key if len(self.key) > 1 else (key,)

    def from_row(self, row: Sequence[Any]) -> E:
        """The entity of a row read through `columns`; fields that are not kept have their defaults."""
        values = list(row)
        for i, decode in self._decoders:
            values[i] = decode(values[i])
        return self.cls(*values) if self._first else self.cls(**dict(zip(self.names, values, strict=True)))

    def select(self) -> sa.Select[Any]:
        """All rows; add conditions and an order."""
        return sa.select(*self.columns)

    def read(self, connection: sa.Connection, query: sa.Select[Any]) -> list[E]:
        """The entities of a query that began with `select`."""
        return [self.from_row(row) for row in connection.execute(query)]

    def write_sql(self, dialect: sa.Dialect) -> str:
        """The statement that writes one row, for the driver's executemany."""
        mark = "?" if dialect.paramstyle == "qmark" else "%s"
        quote = dialect.identifier_preparer.quote
        names = ", ".join(map(quote, self.names))
        marks = ", ".join([mark] * len(self.names))
        insert = f"INSERT INTO {quote(self.table.name)} ({names}) VALUES ({marks})"  # noqa: S608 - names of our schema
        if self.once:
            return insert
        sets = ", ".join(f"{quote(n)} = excluded.{quote(n)}" for n in self._changing)
        return f"{insert} ON CONFLICT ({', '.join(map(quote, self.key))}) DO UPDATE SET {sets}"

    def delete_sql(self, dialect: sa.Dialect) -> str:
        """The statement that deletes one row by its key, for the driver's executemany."""
        mark = "?" if dialect.paramstyle == "qmark" else "%s"
        quote = dialect.identifier_preparer.quote
        where = " AND ".join(f"{quote(k)} = {mark}" for k in self.key)
        return f"DELETE FROM {quote(self.table.name)} WHERE {where}"  # noqa: S608 - names of our schema


def _codec(hint: Any) -> tuple[Codec, Codec]:
    """Value to JSON text, and the parsed JSON to the value."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is dict:
        return _dumps, dict
    item = args[0]
    if is_dataclass(item):
        return _dataclasses(item)  # type: ignore[arg-type]
    if get_origin(item) is tuple:  # (name, number) pairs
        return _encode_numbers, _decode_numbers
    return _dumps, tuple if origin is tuple else list


def _dataclasses(cls: type[Any]) -> tuple[Codec, Codec]:
    names = [f.name for f in fields(cls)]
    sequences = [n for n, hint in get_type_hints(cls).items() if get_origin(hint) is tuple]

    def encode(values: Sequence[Any]) -> str:
        return _dumps([{name: getattr(value, name) for name in names} for value in values])

    def decode(values: Sequence[dict[str, Any]]) -> list[Any]:
        return [cls(**(value | {n: tuple(value[n]) for n in sequences})) for value in values]

    return encode, decode


def _encode_numbers(pairs: Sequence[tuple[str, float]]) -> str:
    # JSON has no infinity and no NaN, but a decision's numbers may have
    return _dumps([(name, number if math.isfinite(number) else str(number)) for name, number in pairs])


def _decode_numbers(pairs: Sequence[tuple[str, Any]]) -> tuple[tuple[str, float], ...]:
    return tuple((name, float(number) if isinstance(number, str) else number) for name, number in pairs)
