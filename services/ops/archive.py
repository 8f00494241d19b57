"""A run's folder read back: exported records, history lines and samples, in the forms that the judges of it use.

Layout of a run's folder:
  records/*.jsonl   what the scheduler knew at the end (records.py)
  history/*.jsonl   what each process did, one JSON line for a fact, written as it happened
  metrics/*.jsonl   one line for each training step, by the trainer that published it; merged into metrics.jsonl
  samples.jsonl     what the live view saw, about one line every two seconds
  demo.json         what was asked for: name, seed, run names, times
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from services.common import wire
from services.common.errors import ConfigError
from services.ops import jsonform
from services.ops.jsonform import unix_time

M = TypeVar("M", bound=wire.Message)

TERMINAL_STATES = frozenset({"TRAINED", "FILTERED", "STALE", "VOID", "CANCELLED", "DELIVERED"})
"""Ends of a trajectory."""
SURVIVING_MANIFESTS = frozenset({"COMMITTED", "COVERED"})
"""States of a manifest whose step is in the surviving weights."""
SURVIVING_VERSIONS = frozenset({"COMMITTED", "PUBLISHED", "EXPIRED"})
"""States of a version that belongs to its lineage."""


@dataclass(frozen=True, slots=True)
class Event:
    """One recorded change; `at` orders all of them."""

    at: tuple[int, int]
    time: float
    kind: str
    name: str
    from_state: str
    to_state: str
    code: str = ""
    text: str = ""
    numbers: dict[str, float] = field(default_factory=dict)
    caused_by: str = ""
    cause: str = ""
    related: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Fact:
    """One history line of a process."""

    t: float
    who: str
    kind: str
    fields: dict[str, Any]

    def __getitem__(self, key: str) -> Any:
        return self.fields[key]

    def get(self, key: str, default: Any = None) -> Any:
        """A field, or the default."""
        return self.fields.get(key, default)


@dataclass(frozen=True, slots=True)
class Member:
    """A trajectory as a manifest holds it."""

    manifest: str
    member: wire.ManifestMember


class Archive:
    """The folder of one run; each part is read when it is first asked for."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not (self.folder / "records").is_dir():
            raise ConfigError(
                f"{self.folder}: no folder 'records' in it; expected the folder of an exported run, e.g. runs/demo"
            )

    # ---- what the scheduler knew

    @cached_property
    def events(self) -> list[Event]:
        """All events in the order of the file."""
        return [_event(row) for row in self._rows("events")]

    @cached_property
    def trajectories(self) -> list[wire.Trajectory]:
        """All trajectories in view FULL."""
        return self._messages("trajectories", wire.Trajectory)

    @cached_property
    def manifests(self) -> dict[str, wire.Manifest]:
        """Manifest headers by name."""
        return {m.name: m for m in self._messages("manifests", wire.Manifest)}

    @cached_property
    def members(self) -> list[Member]:
        """Members of all manifests, in manifest order."""
        return [
            Member(row["manifest"], jsonform.parse(row["member"], wire.ManifestMember)) for row in self._rows("members")
        ]

    @cached_property
    def versions(self) -> list[wire.WeightVersion]:
        """Weight versions."""
        return self._messages("versions", wire.WeightVersion)

    @cached_property
    def reassignments(self) -> list[wire.Reassignment]:
        """Reassignments."""
        return self._messages("reassignments", wire.Reassignment)

    @cached_property
    def accelerators(self) -> list[wire.Accelerator]:
        """Accelerators."""
        return self._messages("accelerators", wire.Accelerator)

    @cached_property
    def replicas(self) -> dict[str, wire.Replica]:
        """Replicas by name."""
        return {r.name: r for r in self._messages("replicas", wire.Replica)}

    @cached_property
    def runs(self) -> dict[str, wire.Run]:
        """Runs by name."""
        return {r.name: r for r in self._messages("runs", wire.Run)}

    # ---- what the processes did, and what was seen of them

    @cached_property
    def facts(self) -> list[Fact]:
        """History lines of all processes, by time."""
        facts = []
        for path in sorted((self.folder / "history").glob("*.jsonl")):
            for row in _lines(path, torn_tail=True):
                rest = {k: v for k, v in row.items() if k not in ("t", "who", "kind")}
                facts.append(Fact(float(row["t"]), str(row["who"]), str(row["kind"]), rest))
        return sorted(facts, key=lambda f: f.t)

    def facts_of(self, *kinds: str) -> Iterator[Fact]:
        """History lines of these kinds, by time."""
        return (f for f in self.facts if f.kind in kinds)

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """One line for each training step of each run, by step; of a redone step the first line, made as new work."""
        rows = [row for path in self.metrics_files() for row in _lines(path, torn_tail=True) if "step" in row]
        rows.sort(key=lambda row: (bool(row.get("redo")), float(row.get("t", 0.0))))
        first: dict[tuple[str, int, int], dict[str, Any]] = {}
        for row in rows:
            first.setdefault((str(row.get("run", "")), int(row.get("lineage", 1)), int(row["step"])), row)
        return [first[key] for key in sorted(first)]

    def metrics_files(self) -> list[Path]:
        """What the trainers wrote; the merged metrics.jsonl if that is all there is."""
        single = self.folder / "metrics.jsonl"
        return sorted((self.folder / "metrics").glob("*.jsonl")) or ([single] if single.exists() else [])

    @cached_property
    def samples(self) -> list[dict[str, Any]]:
        """Lines of samples.jsonl."""
        return self._optional("samples.jsonl")

    @property
    def demo(self) -> dict[str, Any]:
        """What was asked for."""
        return self._document("demo.json")

    @property
    def blobs(self) -> str:
        """URI of the blob store that the run wrote to."""
        return str(self.demo.get("blobs") or self.folder / "blobs")

    @property
    def since(self) -> float:
        """When the job began (unix seconds): what a cluster that lives longer did before is not of this run."""
        return float(self.demo.get("started", 0.0))

    @property
    def summary(self) -> dict[str, Any]:
        """The summary, once written."""
        return self._document("summary.json")

    @property
    def verdict(self) -> dict[str, Any]:
        """The checker's verdict, once written."""
        return self._document("verdict.json")

    # ---- reading

    def _document(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        if not path.exists():
            return {}
        document = json.loads(path.read_text())
        return document if isinstance(document, dict) else {}

    def _optional(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / name
        return list(_lines(path, torn_tail=True)) if path.exists() else []

    def _rows(self, name: str) -> Iterator[dict[str, Any]]:
        path = self.folder / "records" / f"{name}.jsonl"
        if not path.exists():
            raise ConfigError(f"{path}: missing; the export of this run is not complete, so it cannot be judged")
        return _lines(path, torn_tail=False)

    def _messages(self, name: str, make: type[M]) -> list[M]:
        parsed = []
        for number, row in enumerate(self._rows(name), 1):
            try:
                parsed.append(jsonform.parse(row, make))
            except wire.ParseError as error:
                raise ConfigError(f"{self.folder}/records/{name}.jsonl:{number}: {error}") from None
        return parsed


def _lines(path: Path, *, torn_tail: bool) -> Iterator[dict[str, Any]]:
    """JSON lines. With `torn_tail` a last line without its end (the writer was killed in it) is left out."""
    text = path.read_text(encoding="utf-8")
    rows = text.split("\n")
    for number, row in enumerate(rows, 1):
        if not row.strip():
            continue
        try:
            parsed = json.loads(row)
        except ValueError:
            if torn_tail and number == len(rows):
                return
            raise ConfigError(f"{path}:{number}: not a JSON line; the file was changed or cut") from None
        if not isinstance(parsed, dict):
            raise ConfigError(f"{path}:{number}: expected a JSON object")
        yield parsed


def _event(row: dict[str, Any]) -> Event:
    # by hand: a run has tens of thousands, and parsing each as a message costs ten times as much
    reason = row.get("reason", {})
    return Event(
        at=(int(row.get("revision", 0)), int(row.get("index", 0))),
        time=unix_time(row.get("time", "")),
        kind=str(row.get("kind", "")).removeprefix("RESOURCE_KIND_"),
        name=row.get("name", ""),
        from_state=row.get("from_state", ""),
        to_state=row.get("to_state", ""),
        code=reason.get("code", ""),
        text=reason.get("text", ""),
        numbers={k: float(v) for k, v in reason.get("numbers", {}).items()},
        caused_by=row.get("caused_by", ""),
        cause=row.get("cause", ""),
        related=tuple(row.get("related", ())),
    )


def state_name(value: str, prefix: str) -> str:
    """An enum value's name without its prefix."""
    return value.removeprefix(prefix)


def manifest_state(manifest: wire.Manifest) -> str:
    """State of a manifest, without prefix."""
    return state_name(wire.ManifestState.Name(manifest.state), "MANIFEST_STATE_")


def trajectory_state(trajectory: wire.Trajectory) -> str:
    """State of a trajectory, without prefix."""
    return state_name(wire.TrajectoryState.Name(trajectory.state), "TRAJECTORY_STATE_")


def version_state(version: wire.WeightVersion) -> str:
    """State of a version, without prefix."""
    return state_name(wire.VersionState.Name(version.state), "VERSION_STATE_")


def run_of(name: str) -> str:
    """runs/{run} of anything named below it."""
    return "/".join(name.split("/")[:2])


def last_by_name(events: Iterable[Event], kind: str) -> dict[str, Event]:
    """The newest event of each resource of a kind."""
    return {e.name: e for e in events if e.kind == kind}
