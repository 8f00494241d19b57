"""The trained model as a folder in Hugging Face format, put together from what was published."""

import shutil
from pathlib import Path

import safetensors
import safetensors.numpy

from services.client import LibraClient
from services.common import wire
from services.common.blobs import BlobStore
from services.common.errors import LibraError

COPIED_SUFFIXES = (".json", ".txt", ".model", ".jinja")
"""Files of the base model that a checkpoint needs beside its weights: configuration, tokenizer, chat template."""
WEIGHTS_FILE = "model.safetensors"


async def newest_published(client: LibraClient, run: str) -> wire.WeightVersion:
    """The newest PUBLISHED version of a run that has files; NOT_FOUND if nothing was trained."""
    listed = await client.list_resources(wire.RESOURCE_KIND_WEIGHT_VERSION, prefix=run)
    usable = [
        r.weight_version
        for r in listed.resources
        if r.weight_version.state == wire.VERSION_STATE_PUBLISHED and r.weight_version.files.shards
    ]
    if not usable:
        raise LibraError("NOT_FOUND", f"{run} has no published version: no step was completed", resource=run)
    return max(usable, key=lambda v: (v.version.lineage, v.version.number))


def assemble(version: wire.WeightVersion, base: Path, blobs: BlobStore, target: Path) -> Path:
    """Writes the version's tensors with the base model's other files to `target`, whole or not at all.

    BLOB_MISMATCH if a published file differs from its hash.
    """
    part = target.with_name(f".{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    for path in sorted(base.iterdir()):
        if path.is_file() and path.suffix in COPIED_SUFFIXES and not path.name.endswith(".index.json"):
            shutil.copy2(path, part / path.name)
    shards = [blobs.get(shard.blob) for shard in version.files.shards]
    if len(shards) == 1:
        (part / WEIGHTS_FILE).write_bytes(shards[0])
    else:
        tensors = {name: tensor for data in shards for name, tensor in safetensors.numpy.load(data).items()}
        safetensors.numpy.save_file(tensors, part / WEIGHTS_FILE, metadata={"format": "pt"})
    shutil.rmtree(target, ignore_errors=True)
    part.replace(target)
    return target
