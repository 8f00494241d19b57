"""The blob store: immutable bytes under a key, found again by URI and SHA-256 (fsspec: folder, s3, gcs ...)."""

import contextlib
import hashlib
import os
import threading
from pathlib import Path

import fsspec

from services.common import errors, failpoints, wire


class BlobStore:
    """A folder or bucket. `put` returns only after the bytes are durable; `get` checks size and hash."""

    def __init__(self, uri: str) -> None:
        self.uri = uri.rstrip("/")
        self._local = Path(self.uri.removeprefix("file://")) if "://" not in uri or uri.startswith("file://") else None
        if self._local is not None:
            self._local = self._local.absolute()
            self.uri = f"file://{self._local}"
            self._local.mkdir(parents=True, exist_ok=True)

    def put(self, key: str, data: bytes) -> wire.BlobRef:
        """Writes `data` under `key` (replacing equal content is harmless) and returns its reference."""
        if key.startswith("/") or ".." in key.split("/"):
            raise errors.invalid_field(f"blob key {key!r}: expected a relative path without '..'")
        failpoints.hit("blobs.put")
        uri = f"{self.uri}/{key}"
        if self._local is not None:
            self._put_file(self._local / key, data)
        else:
            with fsspec.open(uri, "wb") as file:
                file.write(data)
        return wire.BlobRef(uri=uri, sha256=hashlib.sha256(data).hexdigest(), size_bytes=len(data))

    @staticmethod
    def _put_file(path: Path, data: bytes) -> None:
        made = [p for p in (path.parent, *path.parent.parents) if not p.exists()]
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.part")
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            os.fsync(fd)
        finally:
            os.close(fd)
        part.replace(path)
        for folder in {path.parent, *(p.parent for p in made)}:
            _sync_folder(folder)

    def get(self, ref: wire.BlobRef) -> bytes:
        """Reads a blob wherever its URI points; BLOB_MISMATCH if it is gone or differs."""
        try:
            if ref.uri.startswith("file://"):
                data = Path(ref.uri.removeprefix("file://")).read_bytes()
            else:
                with fsspec.open(ref.uri, "rb") as file:
                    data = file.read()
        except FileNotFoundError:
            raise errors.blob_mismatch(ref.uri, "the blob is gone") from None
        if len(data) != ref.size_bytes:
            raise errors.blob_mismatch(ref.uri, f"expected {ref.size_bytes} bytes, found {len(data)}")
        found = hashlib.sha256(data).hexdigest()
        if found != ref.sha256:
            raise errors.blob_mismatch(ref.uri, f"expected sha256 {ref.sha256}, found {found}")
        return data


def _sync_folder(folder: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
