"""The file of a segment: named per-token columns as safetensors. Read and written without torch."""

from collections.abc import Mapping

import numpy as np
import safetensors
import safetensors.numpy

from services.common import errors

DTYPES = {"ids": "int32", "loss_mask": "uint8", "logprob": "float32", "weight_version": "int64"}
"""Element types of the known columns. weight_version has shape [n, 2] = (lineage, number), -1 where not generated;
logprob is 0 where not generated; the others have shape [n]."""


def encode(columns: Mapping[str, np.ndarray]) -> bytes:
    """Serialises columns of equal length; INVALID_FIELD if ids or loss_mask is missing or lengths differ."""
    length = len(columns["ids"]) if "ids" in columns else -1
    if length < 0 or "loss_mask" not in columns:
        raise errors.invalid_field(f"a segment needs the columns ids and loss_mask; it has {sorted(columns)}")
    arrays: dict[str, np.ndarray] = {}
    for name, column in columns.items():
        if len(column) != length:
            raise errors.invalid_field(f"column {name} has {len(column)} rows, ids has {length}")
        arrays[name] = np.ascontiguousarray(column, dtype=DTYPES.get(name, column.dtype))
    data: bytes = safetensors.numpy.save(arrays)
    return data


def decode(data: bytes) -> dict[str, np.ndarray]:
    """The columns of a segment's file; BLOB_MISMATCH if it is not one."""
    try:
        return dict(safetensors.numpy.load(data))
    except safetensors.SafetensorError as error:
        raise errors.blob_mismatch("segment", f"not a safetensors file: {error}") from error
