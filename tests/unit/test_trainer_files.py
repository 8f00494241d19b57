"""What trainers write stays readable under the reference that was given out, whoever writes the same version again."""

import numpy as np
import pytest

from services.common.blobs import BlobStore
from services.trainer import publish
from services.trainer.checkpoints import Checkpoints
from services.trainer.version import Version

VERSION = Version(1, 12)
FIRST = {"w": np.array([1.0, 2.0])}
LAST_BIT = {"w": np.array([1.0, np.nextafter(2.0, 3.0)])}
"""The same sum in another order."""


def test_weights_that_two_replicas_wrote_are_both_there(tmp_path):
    store = BlobStore(str(tmp_path))
    first = publish.write(store, "runs/r", VERSION, FIRST)
    second = publish.write(store, "runs/r", VERSION, LAST_BIT)
    assert np.array_equal(publish.read(store, first.manifest)["w"], FIRST["w"])
    assert np.array_equal(publish.read(store, second.manifest)["w"], LAST_BIT["w"])
    assert first.manifest.shards[0].name == "model.safetensors"
    assert publish.write(store, "runs/r", VERSION, FIRST).manifest == first.manifest


def test_a_checkpoint_that_another_replica_writes_again_is_whole_at_any_moment(tmp_path, monkeypatch):
    checkpoints = Checkpoints(BlobStore(str(tmp_path)), "r")
    checkpoints.save(VERSION, FIRST, {})
    put = BlobStore.put

    def dies_before_the_index(self, key, data):
        if key.endswith("index.json"):
            raise OSError("killed")
        return put(self, key, data)

    monkeypatch.setattr(BlobStore, "put", dies_before_the_index)
    with pytest.raises(OSError, match="killed"):
        checkpoints.save(VERSION, LAST_BIT, {})
    assert np.array_equal(checkpoints.load(VERSION)["w"], FIRST["w"])
