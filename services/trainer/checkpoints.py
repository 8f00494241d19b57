"""Checkpoints in the blob store: parameters, optimizer, random number generators, version.

The index is written last and names the state's hash, so a checkpoint is there whole or not at all.
"""

import contextlib
import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import fsspec
import safetensors.numpy

from services.common import errors, log, wire
from services.common.blobs import BlobStore
from services.common.errors import LibraError
from services.trainer.engine.base import Array
from services.trainer.version import Version

_log = log.get(__name__)

FORMAT = 1
STATE_FILE = "state-{content}.safetensors"
"""Named after its content: another replica's state of the same version does not take its place under an index."""
KEY_DIGITS = 16
INDEX_FILE = "index.json"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One complete checkpoint."""

    version: Version
    index: wire.BlobRef
    create_time: float
    """Seconds since the epoch, for display."""


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, store: BlobStore, run_id: str) -> None:
        self._store = store
        self._folder = f"{run_id}/checkpoints"

    def save(self, version: Version, state: Mapping[str, Array], settings: Mapping[str, Any]) -> Checkpoint:
        """Writes a checkpoint; returns once it is durable."""
        folder = f"{self._folder}/{version}"
        data = safetensors.numpy.save(dict(state), metadata={"version": str(version)})
        file = STATE_FILE.format(content=hashlib.sha256(data).hexdigest()[:KEY_DIGITS])
        ref = self._store.put(f"{folder}/{file}", data)
        now = time.time()
        index = {
            "format": FORMAT,
            "lineage": version.lineage,
            "number": version.number,
            "create_time": now,
            "state": {"file": file, "sha256": ref.sha256, "size_bytes": ref.size_bytes},
            "settings": dict(settings),
        }
        text = json.dumps(index, indent=1, sort_keys=True).encode()
        return Checkpoint(version, self._store.put(f"{folder}/{INDEX_FILE}", text), now)

    def newest(self, at_most: Version) -> tuple[Version, dict[str, Array]] | None:
        """The newest readable checkpoint of the lineage that is not above `at_most`; None if there is none.

        One that is broken is passed over with a warning: an older one and a longer redo are better than none.
        """
        for version in self.versions():
            if version.lineage != at_most.lineage or version > at_most:
                continue
            try:
                return version, self.load(version)
            except (LibraError, OSError, ValueError, KeyError) as error:
                _log.warning("checkpoint passed over", version=str(version), error=str(error))
        return None

    def versions(self) -> list[Version]:
        """Versions with an index, newest first."""
        filesystem, path = fsspec.core.url_to_fs(f"{self._store.uri}/{self._folder}")
        found: list[Version] = []
        with contextlib.suppress(FileNotFoundError):
            # another process may have written since this filesystem object listed the folder
            filesystem.invalidate_cache()
            for entry in filesystem.ls(path, detail=False):
                name = str(entry).rstrip("/").rsplit("/", 1)[-1]
                lineage, _, number = name.partition("-")
                if lineage.isdigit() and number.isdigit() and filesystem.exists(f"{entry}/{INDEX_FILE}"):
                    found.append(Version(int(lineage), int(number)))
        return sorted(found, reverse=True)

    def load(self, version: Version) -> dict[str, Array]:
        """The state of a checkpoint; BLOB_MISMATCH if it differs from its index."""
        folder = f"{self._store.uri}/{self._folder}/{version}"
        with fsspec.open(f"{folder}/{INDEX_FILE}", "rb") as file:
            index = json.loads(file.read())
        if index["format"] != FORMAT or (index["lineage"], index["number"]) != (version.lineage, version.number):
            raise errors.blob_mismatch(f"{folder}/{INDEX_FILE}", f"not an index of version {version}, format {FORMAT}")
        state = index["state"]
        ref = wire.BlobRef(uri=f"{folder}/{state['file']}", sha256=state["sha256"], size_bytes=state["size_bytes"])
        return dict(safetensors.numpy.load(self._store.get(ref)))
