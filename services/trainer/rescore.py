"""Re-scores recorded tokens with the weights that sampled them: `python -m services.trainer.rescore --input FILE`.

For each sequence and each weight version in it, one forward pass over the whole prefix under that version gives the
log-probability of every token the version sampled; it is compared with the recorded one. No KV cache, no batching
tricks of an engine: what an engine that was preempted, moved or given new weights recorded must come out the same.

The input names blobs, never tokens; the answer (JSON on standard output) holds numbers only. Exit code 2: bad input.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import transformers

from services.common import segment, wire
from services.common.blobs import BlobStore
from services.common.errors import ConfigError, LibraError

Version = tuple[str, int, int]
"""(run, lineage, number)."""

PAD = 0
"""Filler behind a sequence's end; under the causal mask no earlier position sees it."""


@dataclass(slots=True)
class Row:
    """A registered segment within a sequence: positions [first, first + tokens) are its own."""

    trajectory: str
    sequence: int
    first: int
    tokens: int
    temperature: float
    owned: bool
    checked: int = 0
    mismatched: int = 0
    worst: float = 0.0


@dataclass(slots=True)
class Line:
    """One sequence, whole from position 0: ids int64[n], logprob float32[n], lineage and number int64[n]."""

    run: str
    rows: list[Row]
    ids: np.ndarray
    logprob: np.ndarray
    lineage: np.ndarray
    number: np.ndarray


@dataclass(slots=True)
class Outcome:
    """What came out: a row for each segment, and versions whose weights could not be had, with why."""

    rows: list[Row] = field(default_factory=list)
    unavailable: dict[Version, str] = field(default_factory=dict)


def logprobs(model: torch.nn.Module, ids: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Gives log p(ids[b, t] | ids[b, :t]), t >= 1, float32[b, n - 1]; ids int64[b, n], temperature like the result."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    scaled = logits / temperature.unsqueeze(-1)
    chosen = scaled.gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)
    return chosen - scaled.logsumexp(-1)


def batches(lines: Sequence[Line], batch_tokens: int) -> Iterable[list[Line]]:
    """Lines of similar length together, at most `batch_tokens` with padding; a longer line goes alone."""
    batch: list[Line] = []
    for item in sorted(lines, key=lambda x: len(x.ids)):
        if batch and len(item.ids) * (len(batch) + 1) > batch_tokens:
            yield batch
            batch = []
        batch.append(item)
    if batch:
        yield batch


def score(model: torch.nn.Module, version: Version, lines: Sequence[Line], threshold: float, batch_tokens: int) -> None:
    """Compares every token of `version` in these lines and adds what differs to their rows."""
    for batch in batches(lines, batch_tokens):
        longest = max(len(x.ids) for x in batch)
        ids = torch.full((len(batch), longest), PAD, dtype=torch.int64)
        temperature = torch.ones(len(batch), longest - 1)  # a sequence has a prompt, so longest > 1
        for b, item in enumerate(batch):
            ids[b, : len(item.ids)] = torch.from_numpy(item.ids)
            for row in item.rows:
                # position p is predicted at p - 1
                temperature[b, max(0, row.first - 1) : row.first + row.tokens - 1] = row.temperature
        with torch.inference_mode():
            recomputed = logprobs(model, ids, temperature).numpy()
        for b, item in enumerate(batch):
            _compare(item, version, recomputed[b], threshold)


def _compare(item: Line, version: Version, recomputed: np.ndarray, threshold: float) -> None:
    _, lineage, number = version
    for row in item.rows:
        if not row.owned:
            continue
        own = slice(max(1, row.first), row.first + row.tokens)
        sampled = (item.lineage[own] == lineage) & (item.number[own] == number)
        if not sampled.any():
            continue
        difference = np.abs(recomputed[own.start - 1 : own.stop - 1] - item.logprob[own])[sampled]
        # NaN compares false with everything: count what is not proven close
        row.mismatched += int((~(difference <= threshold)).sum())
        row.checked += int(sampled.sum())
        row.worst = max(row.worst, float(np.nan_to_num(difference, nan=np.inf).max()))


def load(model: torch.nn.Module, shards: Sequence[wire.BlobRef], blobs: BlobStore) -> None:
    """Puts a version's tensors into the model; LibraError if a blob differs, ConfigError if tensors do not fit."""
    state: dict[str, torch.Tensor] = {}
    for ref in shards:
        state |= safetensors.torch.load(blobs.get(ref))
    missing, unexpected = model.load_state_dict(state, strict=False)
    tied = set(getattr(model, "_tied_weights_keys", None) or ())
    if unexpected or set(missing) - tied:
        raise ConfigError(f"tensors do not fit the model: missing {sorted(set(missing) - tied)}, unknown {unexpected}")
    if hasattr(model, "tie_weights"):
        model.tie_weights()


def read_line(item: dict[str, Any], blobs: BlobStore) -> Line:
    """Puts a sequence together from its segments' blobs."""
    rows: list[Row] = []
    parts: dict[str, list[np.ndarray]] = defaultdict(list)
    first = 0
    for part in item["rows"]:
        columns = segment.decode(blobs.get(_ref(part)))
        cut = slice(part["start"], part["stop"])
        ids = columns["ids"][cut]
        tokens = len(ids)
        parts["ids"].append(ids.astype(np.int64))
        parts["logprob"].append(columns.get("logprob", np.zeros(part["stop"], np.float32))[cut])
        parts["version"].append(columns.get("weight_version", np.full((part["stop"], 2), -1, np.int64))[cut])
        rows.append(Row(item["trajectory"], item["sequence"], first, tokens, part["temperature"], part["owned"]))
        first += tokens
    version = np.concatenate(parts["version"])
    return Line(
        item["run"], rows, np.concatenate(parts["ids"]), np.concatenate(parts["logprob"]), version[:, 0], version[:, 1]
    )


def rescore(request: dict[str, Any], blobs: BlobStore) -> Outcome:
    """Scores all sequences of a request, version by version, each version's weights loaded once."""
    outcome = Outcome()
    lines = [read_line(item, blobs) for item in request["sequences"]]
    outcome.rows = [row for item in lines for row in item.rows if row.owned]
    by_version: dict[Version, list[Line]] = defaultdict(list)
    for item in lines:
        pairs = {(int(a), int(b)) for a, b in zip(item.lineage, item.number, strict=True) if b >= 0}
        for lineage, number in pairs:
            by_version[item.run, lineage, number].append(item)
    known = {(v["run"], v["lineage"], v["number"]): v for v in request["versions"]}
    model, path = None, ""
    for version in sorted(by_version, key=lambda v: (known.get(v, {}).get("model", ""), v)):
        source = known.get(version)
        if source is None:
            outcome.unavailable[version] = "no such version is recorded"
            continue
        if model is None or path != source["model"] or not source["shards"]:
            path = source["model"]
            model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        try:
            if source["shards"]:
                load(model, [_ref(s) for s in source["shards"]], blobs)
        except (LibraError, ConfigError) as error:
            outcome.unavailable[version] = str(error)
            continue
        score(model, version, by_version[version], request["threshold"], request["batch_tokens"])
    return outcome


def _ref(part: dict[str, Any]) -> wire.BlobRef:
    return wire.BlobRef(uri=part["uri"], sha256=part["sha256"], size_bytes=part["size_bytes"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads the request, prints the outcome as JSON."""
    parser = argparse.ArgumentParser(description="Re-scores recorded tokens with the weights that sampled them.")
    parser.add_argument("--input", required=True, type=Path, help="JSON request written by the checker")
    path = parser.parse_args(arguments).input
    try:
        request = json.loads(path.read_text())
        torch.set_num_threads(int(request.get("threads", 1)))
        outcome = rescore(request, BlobStore(request["blobs"]))
    except (OSError, ValueError, KeyError, ConfigError, LibraError) as error:
        sys.stderr.write(f"{path}: cannot re-score: {error!r}\n")
        return 2
    rows = [
        {
            "trajectory": r.trajectory, "sequence": r.sequence, "first_position": r.first, "tokens": r.tokens,
            "checked": r.checked, "mismatched": r.mismatched, "worst": r.worst if np.isfinite(r.worst) else -1.0,
        }
        for r in outcome.rows
    ]  # fmt: skip
    unavailable = [{"run": v[0], "lineage": v[1], "number": v[2], "why": why} for v, why in outcome.unavailable.items()]
    sys.stdout.write(json.dumps({"rows": rows, "unavailable": unavailable}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
