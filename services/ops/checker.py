"""The offline judge of a run: reads its folder, needs no scheduler, and names each broken promise (`libra check DIR`).

What it computes goes into verdict.json beside the records, and from there into the summary and the report.
"""

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from services.common.blobs import BlobStore
from services.ops.archive import Archive
from services.ops.checks import conservation, lifecycles, lineage, logprobs, ownership, staleness
from services.ops.checks.finding import Finding, Violation
from services.ops.checks.segments import Segments

SHOWN = 20
"""Violations printed; verdict.json holds all."""

PROMISES = {
    "events": "events are ordered and none is missing",
    "P1": "no accelerator has two owners",
    "P2": "no admitted trajectory is lost",
    "P3": "each trained trajectory is in the weights exactly once",
    "P4": "versions rise by one and never fall",
    "P5": "no trained token is staler than the bound",
    "P14": "no acknowledged token is lost or changed",
}
"""One sentence for each promise judged here."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Numbers, and every violation by name; `passed` if there is none."""

    numbers: dict[str, int] = field(default_factory=dict)
    violations: list[Violation] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """True if no promise is broken."""
        return not self.violations

    def broken(self) -> dict[str, int]:
        """Number of violations of each check, by name."""
        counts: dict[str, int] = {}
        for violation in self.violations:
            counts[violation.check] = counts.get(violation.check, 0) + 1
        return dict(sorted(counts.items()))

    def document(self) -> dict[str, Any]:
        """The JSON form."""
        promises = {
            name: {"text": text, "violations": sum(v.check.partition(".")[0] == name for v in self.violations)}
            for name, text in PROMISES.items()
        }
        return {
            "passed": self.passed,
            "numbers": self.numbers,
            "promises": promises,
            "violations": [asdict(v) for v in self.violations],
            "seconds": round(self.seconds, 3),
        }


def check(archive: Archive | str | Path, *, rescore: bool = True) -> Verdict:
    """Judges a run by its archive or folder; ConfigError if its records are missing or damaged.

    `rescore=False` leaves out the re-scoring of moved trajectories, which needs torch.
    """
    started = time.monotonic()
    archive = archive if isinstance(archive, Archive) else Archive(archive)
    segments = Segments(BlobStore(archive.blobs))
    total = Finding()
    total.merge(lifecycles.check(archive))
    total.merge(ownership.check(archive))
    total.merge(lineage.check(archive))
    total.merge(staleness.check(archive, segments))
    total.merge(conservation.check(archive, segments))
    if rescore:
        total.merge(logprobs.check(archive, segments))
    return Verdict(total.numbers, total.violations, time.monotonic() - started)


def write(folder: str | Path, verdict: Verdict) -> Path:
    """Writes verdict.json, whole or not at all."""
    path = Path(folder) / "verdict.json"
    part = path.with_name(".verdict.json.part")
    part.write_text(json.dumps(verdict.document(), indent=2) + "\n")
    part.replace(path)
    return path


def text(verdict: Verdict) -> str:
    """The verdict for people."""
    lines = []
    document = verdict.document()
    for name, promise in document["promises"].items():
        mark = "ok  " if not promise["violations"] else "FAIL"
        count = f"  ({promise['violations']} violations)" if promise["violations"] else ""
        lines.append(f"  {mark} {name:<7} {promise['text']}{count}")
    lines.append("  " + ", ".join(f"{k} {v}" for k, v in sorted(verdict.numbers.items())))
    lines += [f"  {v.check}: {v.resource}: {v.text}" for v in verdict.violations[:SHOWN]]
    if len(verdict.violations) > SHOWN:
        lines.append(f"  ... and {len(verdict.violations) - SHOWN} more in verdict.json")
    head = "every promise holds" if verdict.passed else f"BROKEN: {', '.join(verdict.broken())}"
    return "\n".join([f"check: {head} ({verdict.seconds:.1f} s)", *lines])


def main(path: str | Path, *, as_json: bool = False) -> int:
    """`libra check DIR`: prints the verdict and writes verdict.json. 0 if all holds, 1 if a promise is broken."""
    verdict = check(path)
    write(path, verdict)
    print(json.dumps(verdict.document(), indent=2) if as_json else text(verdict))
    return 0 if verdict.passed else 1
