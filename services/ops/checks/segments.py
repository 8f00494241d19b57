"""The token columns of segments, read from the blob store once each, with the damage told instead of raised."""

from dataclasses import dataclass

import numpy as np

from services.common import segment as segment_file
from services.common import wire
from services.common.blobs import BlobStore
from services.common.errors import LibraError


@dataclass(frozen=True, slots=True)
class Columns:
    """A segment's columns: loss mask bool[n], generated bool[n], version int64[n, 2] (-1 where not generated)."""

    mask: np.ndarray
    generated: np.ndarray
    version: np.ndarray


class Segments:
    """Reads segments; remembers both what was read and what could not be."""

    def __init__(self, blobs: BlobStore) -> None:
        self.blobs = blobs
        self._read: dict[str, Columns | str] = {}

    def columns(self, segment: wire.Segment) -> Columns | str:
        """The columns, or why they cannot be had: blob gone, another hash, or another length than registered."""
        key = segment.blob.sha256
        if key not in self._read:
            self._read[key] = self._load(segment)
        return self._read[key]

    def _load(self, segment: wire.Segment) -> Columns | str:
        try:
            columns = segment_file.decode(self.blobs.get(segment.blob))
        except LibraError as error:
            return str(error)
        length = len(columns["ids"])
        if length != segment.tokens:
            return f"{segment.blob.uri}: holds {length} tokens, {segment.tokens} are registered"
        version = columns.get("weight_version")
        if version is None:
            version = np.full((length, 2), -1, np.int64)
        return Columns(columns["loss_mask"].astype(bool), version[:, 1] >= 0, version)
