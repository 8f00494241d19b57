"""Segments of moved trajectories re-scored by the weights that sampled them: |difference of logprobs| at most 1e-4.

The arithmetic needs torch, which the command line does not import: it runs as `python -m services.trainer.rescore`.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from services.common import wire
from services.ops.archive import Archive, run_of
from services.ops.checks.conservation import moved
from services.ops.checks.finding import Finding
from services.ops.checks.segments import Segments

THRESHOLD = 1e-4
"""Largest difference of a logprob, nats."""
BATCH_TOKENS = 8_192
DEADLINE_SECONDS = 300.0
MAX_SEQUENCES = 2_000
"""Sequences re-scored at most; a job that moved more is re-scored in part and says so."""


def check(archive: Archive, segments: Segments) -> Finding:
    """Counts `segments_mismatched` and `segments_rescored`."""
    finding = Finding({"segments_mismatched": 0, "segments_rescored": 0, "trajectories_moved": 0})
    names = moved(archive)
    finding.numbers["trajectories_moved"] = len(names)
    request = _request(archive, segments, names, finding)
    if not request["sequences"]:
        return finding
    answer = _run(request, archive.folder, finding)
    if answer is None:
        return finding
    for row in answer["rows"]:
        where = f"{row['trajectory']} sequence {row['sequence']} at {row['first_position']}"
        finding.count("segments_rescored", int(row["checked"] > 0))
        if row["mismatched"]:
            finding.count("segments_mismatched")
            finding.add(
                "P14.logprob_differs", where,
                f"{row['mismatched']} of {row['checked']} logprobs differ by up to {row['worst']:.3g} from what their "
                f"weights give; expected at most {THRESHOLD:g}",
            )  # fmt: skip
    for row in answer["unavailable"]:
        version = f"{row['run']} version {row['lineage']}-{row['number']}"
        finding.add("P14.not_rescored", version, f"sampled moved tokens, but its weights cannot be had: {row['why']}")
    return finding


def _request(archive: Archive, segments: Segments, names: set[str], finding: Finding) -> dict[str, Any]:
    sequences = []
    for trajectory in archive.trajectories:
        if trajectory.name not in names:
            continue
        for sequence in trajectory.sequences:
            why = _cannot(sequence, segments)
            if why:
                finding.add("P14.not_rescored", f"{trajectory.name} sequence {sequence.index}", why)
            elif sum(s.trainable_tokens for s in sequence.segments):
                sequences.append(_sequence(trajectory, sequence))
    if len(sequences) > MAX_SEQUENCES:
        finding.numbers["sequences_not_rescored"] = len(sequences) - MAX_SEQUENCES
        del sequences[MAX_SEQUENCES:]
    runs = {s["run"] for s in sequences}
    return {
        "threshold": THRESHOLD,
        "batch_tokens": BATCH_TOKENS,
        "threads": os.cpu_count() or 1,
        "blobs": segments.blobs.uri,
        "versions": [_version(archive, v) for v in archive.versions if run_of(v.name) in runs],
        "sequences": sequences,
    }


def _cannot(sequence: wire.Sequence, segments: Segments) -> str:
    for item in sequence.segments:
        columns = segments.columns(item)
        if isinstance(columns, str):
            return columns
        if item.kv_policy == wire.KV_POLICY_KEEP:
            return "its keys and values were kept over a weight change, so no single version gives its logprobs"
        if item.logprob_kind == wire.LOGPROB_KIND_SAMPLED and (
            item.sampling.top_k or item.sampling.top_p not in (0.0, 1.0)
        ):
            return "its logprobs are those of a truncated distribution"
    return ""


def _sequence(trajectory: wire.Trajectory, sequence: wire.Sequence) -> dict[str, Any]:
    shared = _rows(trajectory, sequence.parent, sequence.fork_position) if sequence.HasField("parent") else []
    own = _rows(trajectory, sequence.index, None)
    rows = [{**r, "owned": False} for r in shared] + own
    return {"run": run_of(trajectory.name), "trajectory": trajectory.name, "sequence": sequence.index, "rows": rows}


def _rows(trajectory: wire.Trajectory, index: int, stop: int | None) -> list[dict[str, Any]]:
    """Segments of a sequence from its root on, those of its parents first, up to position `stop`."""
    sequence = next(s for s in trajectory.sequences if s.index == index)
    rows = []
    if stop is not None and sequence.HasField("parent"):
        rows = _rows(trajectory, sequence.parent, min(stop, sequence.fork_position))
    for item in sequence.segments:
        tokens = item.tokens if stop is None else min(item.tokens, stop - item.first_position)
        if tokens > 0:
            rows.append(
                {**_blob(item.blob), "start": 0, "stop": tokens, "owned": True, "temperature": _temperature(item)}
            )
    return rows


def _temperature(item: wire.Segment) -> float:
    """What the logits were divided by: 1 for untouched logprobs and for greedy sampling."""
    if item.logprob_kind == wire.LOGPROB_KIND_RAW or not item.sampling.HasField("temperature"):
        return 1.0
    return item.sampling.temperature or 1.0


def _version(archive: Archive, version: wire.WeightVersion) -> dict[str, Any]:
    run = run_of(version.name)
    return {
        "run": run,
        "lineage": version.version.lineage,
        "number": version.version.number,
        "model": archive.runs[run].policies[0].model,
        "shards": [_blob(s.blob) for s in version.files.shards],
    }


def _blob(ref: wire.BlobRef) -> dict[str, Any]:
    return {"uri": ref.uri, "sha256": ref.sha256, "size_bytes": ref.size_bytes}


def _run(request: dict[str, Any], folder: Path, finding: Finding) -> dict[str, Any] | None:
    """The answer of the re-scoring process; None (and a violation) if it gave none."""
    with tempfile.TemporaryDirectory(prefix="rescore-", dir=folder) as scratch:
        path = Path(scratch) / "request.json"
        path.write_text(json.dumps(request))
        command: Sequence[str] = [sys.executable, "-m", "services.trainer.rescore", "--input", str(path)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            finding.add("P14.not_rescored", "all", f"re-scoring did not end within {DEADLINE_SECONDS:.0f} s")
            return None
    if done.returncode:
        tail = done.stderr.strip().splitlines()[-1:] or ["no message"]
        finding.add("P14.not_rescored", "all", f"re-scoring ended with status {done.returncode}: {tail[0][:400]}")
        return None
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer
