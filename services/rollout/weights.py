"""The bytes of a weight version, fetched and checked, and the checksum that the engine acknowledges."""

import hashlib
from pathlib import Path

from services.common import errors, wire
from services.common.blobs import BlobStore
from services.rollout.engine.base import Weights


def fetch(command: wire.LoadWeightsCommand, blobs: BlobStore) -> tuple[Weights, str]:
    """Reads what PREPARE names. BLOB_MISMATCH if a file differs, INVALID_FIELD if nothing could be served.

    A version without files is the base model: it is read from `command.model`, and its checksum is formed over the
    weight files there, if it is a folder.
    """
    if not command.model:
        raise errors.invalid_field("LoadWeights names no base model: architecture and tokenizer come from it")
    if not command.files.shards:
        if command.version.number != 0:
            raise errors.invalid_field(
                f"version {command.version.lineage}-{command.version.number} has no files; only number 0 may lack them"
            )
        return Weights(command.model), folder_checksum(command.model)
    if command.files.format not in ("", "safetensors"):
        raise errors.invalid_field(f"weights in format {command.files.format!r}; this engine reads safetensors")
    if command.files.HasField("base"):
        raise errors.invalid_field("the version is a delta or adapter; this engine reads full weights only")
    shards, lines = [], []
    for shard in command.files.shards:
        data = blobs.get(shard.blob)
        shards.append(data)
        lines.append((shard.name, hashlib.sha256(data).hexdigest()))
    found = checksum(lines)
    if command.files.checksum and found != command.files.checksum:
        raise errors.blob_mismatch(
            command.files.shards[0].blob.uri, f"checksum {found}; the manifest says {command.files.checksum}"
        )
    return Weights(command.model, shards), found


def checksum(shards: list[tuple[str, str]]) -> str:
    """SHA-256 over the lines "name sha256\\n" of all shards in order (WeightManifest.checksum)."""
    return hashlib.sha256("".join(f"{name} {sha}\n" for name, sha in shards).encode()).hexdigest()


def folder_checksum(model: str) -> str:
    """The same over the weight files of a model's folder, by name; empty for a hub name."""
    files = sorted(Path(model).glob("*.safetensors")) if Path(model).is_dir() else []
    return checksum([(f.name, hashlib.sha256(f.read_bytes()).hexdigest()) for f in files]) if files else ""
