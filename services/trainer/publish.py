"""Weights as files: what engines load, and the finished model in Hugging Face format."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors.numpy

from services.common import errors, wire
from services.common.blobs import BlobStore
from services.trainer.engine.base import Array
from services.trainer.version import Version

FORMAT = "safetensors"
WEIGHTS_FILE = "model.safetensors"
COPIED_SUFFIXES = (".json", ".txt", ".model", ".jinja")
"""Files of the base model that go into the export: configuration, tokenizer, chat template."""
MAX_COPIED_BYTES = 256 << 20
KEY_DIGITS = 16
"""Hexadecimal digits of a content's hash in its key."""


@dataclass(frozen=True, slots=True)
class Files:
    """The weights of one version, written."""

    version: Version
    manifest: wire.WeightManifest
    data: bytes
    """The one shard, kept for those who read it from here (ReadWeights)."""


def run_id(run: str) -> str:
    """The id in runs/{run}."""
    return run.removeprefix("runs/")


def write(store: BlobStore, run: str, version: Version, weights: Mapping[str, Array]) -> Files:
    """Writes one safetensors shard with Hugging Face names; durable when it returns.

    Two replicas may write one version, where the first died or was slow to say so, and their sums differ in the last
    bit: the key has the content's hash, so that neither takes the other's place under a reference that is out already.
    """
    data: bytes = safetensors.numpy.save(dict(weights), metadata={"format": "pt"})
    content = hashlib.sha256(data).hexdigest()
    ref = store.put(f"{run_id(run)}/weights/{version}/{content[:KEY_DIGITS]}/{WEIGHTS_FILE}", data)
    dtype = next(iter(weights.values())).dtype.name if weights else ""
    shards = [wire.WeightShard(name=WEIGHTS_FILE, blob=ref)]
    manifest = wire.WeightManifest(format=FORMAT, shards=shards, checksum=checksum(shards), dtype=dtype)
    return Files(version, manifest, data)


def checksum(shards: list[wire.WeightShard]) -> str:
    """SHA-256 over the lines "name sha256" of all shards in order, as WeightManifest defines it."""
    digest = hashlib.sha256()
    for shard in shards:
        digest.update(f"{shard.name} {shard.blob.sha256}\n".encode())
    return digest.hexdigest()


def read(store: BlobStore, manifest: wire.WeightManifest) -> dict[str, Array]:
    """The weights of a published version; BLOB_MISMATCH if a file differs from its hash."""
    weights: dict[str, Array] = {}
    for shard in manifest.shards:
        weights.update(safetensors.numpy.load(store.get(shard.blob)))
    return weights


def model_folder(model: str) -> Path:
    """The folder of a model path or hub name; INVALID_FIELD if there is no such model here."""
    path = Path(model)
    if path.is_dir():
        return path
    if path.is_absolute() or model.startswith("."):
        raise errors.invalid_field(f"model {model!r}: no such folder on this machine", resource=model)
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(model))
    except (OSError, ValueError) as error:
        raise errors.invalid_field(f"model {model!r} is neither a folder nor on the hub: {error}") from error


def export(store: BlobStore, run: str, base: Path, files: Files) -> list[wire.BlobRef]:
    """Writes {run}/export/{version}/: the base model's configuration and tokenizer with the trained weights."""
    folder = f"{run_id(run)}/export/{files.version}"
    refs = []
    for path in sorted(base.iterdir()):
        wanted = path.suffix in COPIED_SUFFIXES and not path.name.endswith(".index.json")
        if path.is_file() and wanted and path.stat().st_size <= MAX_COPIED_BYTES:
            refs.append(store.put(f"{folder}/{path.name}", path.read_bytes()))
    refs.append(store.put(f"{folder}/{WEIGHTS_FILE}", files.data))
    return refs
