"""The group of replicas that train one policy together: quorum, agreement, sums. torchft across processes, or alone.

torchft's step counter is our version (lineage and number in one integer), so that its healing always picks the newest
state. It does not decide whether a step counts: CommitStep does.
"""

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torchft
from torch.distributed import ReduceOp, TCPStore
from torchft import ProcessGroupGloo

from services.common import log
from services.trainer import interfaces
from services.trainer.engine.base import Array
from services.trainer.transfer import StateTransport
from services.trainer.version import Version

_log = log.get(__name__)


class StepLost(Exception):
    """The quorum or a collective operation failed; what it would have made must be discarded."""


class NotJoined(StepLost):
    """The group was not formed, or this member's state could not be fetched from a peer."""


@dataclass(frozen=True, slots=True)
class Quorum:
    """Who takes part in a step."""

    rank: int
    count: int
    generations: tuple[int, ...]
    """Generation of each member, in rank order."""
    healed: bool
    """True if the state was just taken over from a peer; the engine holds it now."""


class Collective(Protocol):
    """One replica's seat in the group. Calls are made in the same order on every member."""

    def quorum(self, version: Version) -> Quorum:
        """Forms the group of a step; a member behind the newest state gets it from a peer first. NotJoined."""
        ...

    def agree(self, values: Sequence[int]) -> bool:
        """True, on every member, if all gave the same integers (at most 63 bits each). StepLost."""
        ...

    def sum(self, array: Array) -> None:
        """Replaces the array by the sum over members, in its own number type. StepLost."""
        ...

    def finish(self, version: Version, *, committed: bool) -> None:
        """Ends the step; `version` is what the engine holds now."""
        ...

    def close(self) -> None:
        """Leaves the group; the others notice after the heartbeat timeout. May be opened again by `quorum`."""
        ...


class SoloCollective:
    """A group of one, without any communication: redo, tests, trainers without a lighthouse."""

    def __init__(self, generation: int = 0) -> None:
        self._generation = generation

    def quorum(self, version: Version) -> Quorum:
        del version
        return Quorum(0, 1, (self._generation,), healed=False)

    def agree(self, values: Sequence[int]) -> bool:
        del values
        return True

    def sum(self, array: Array) -> None:
        del array

    def finish(self, version: Version, *, committed: bool) -> None:
        del version, committed

    def close(self) -> None:
        return


@dataclass(frozen=True, slots=True)
class Times:
    """Time-outs, seconds."""

    collective: float = 20.0
    quorum: float = 5.0
    connect: float = 3.0
    heartbeat_interval: float = 0.1
    rejoin: float = 1.5
    """Pause after leaving, longer than the lighthouse's heartbeat timeout: until then it takes the former self, whose
    request it still holds, for a replica that lives, and would pair the newcomer with its own ghost."""


class TorchftCollective:
    """A torchft Manager over gloo.

    The Manager exists only between the first `quorum` and `close`, since one that sends heartbeats without stepping
    holds up all others.
    """

    def __init__(
        self,
        lighthouse: str,
        worker: str,
        generation: int,
        *,
        state: Callable[[], Mapping[str, Array]],
        load_state: Callable[[Mapping[str, Array], int], None],
        host: str = "",
        secret: bytes = b"",
        times: Times | None = None,
    ) -> None:
        """`load_state` gets a peer's arrays and its version counter; an empty host is found by the route there."""
        self._lighthouse = lighthouse if "://" in lighthouse else f"http://{lighthouse}"
        self._id = f"{worker.removeprefix('workers/')}@{generation}"
        self._state, self._load_state = state, load_state
        self._host, self._secret = host, secret
        self._times = times or Times()
        self._manager: torchft.Manager | None = None
        self._group: ProcessGroupGloo | None = None
        self._counter = 0
        self._healed = False
        self._left_at = -math.inf

    def quorum(self, version: Version) -> Quorum:
        self._counter, self._healed = version.counter(), False
        try:
            manager, group = self._open()
            manager.load_state_dict({"step": self._counter, "batches_committed": 0})
            manager.start_quorum()
        except (RuntimeError, TimeoutError, OSError, ValueError) as error:
            # a Manager whose quorum call failed fails at each further one
            self.close()
            raise NotJoined(f"no quorum: {error}") from error
        if manager.errored() is not None:
            raise NotJoined(self._lost("the group could not be formed or the state not be fetched"))
        rank = manager.participating_rank()
        if rank is None:
            raise self._lost("this replica does not take part")
        return Quorum(rank, manager.num_participants(), tuple(group._global_ranks or ()), self._healed)  # noqa: SLF001

    def agree(self, values: Sequence[int]) -> bool:
        pairs = np.array([*values, *(-v for v in values)], dtype=np.int64)
        self._reduce(pairs, ReduceOp.MAX)
        highest, lowest = pairs[: len(values)], -pairs[len(values) :]
        return bool((highest == lowest).all())

    def sum(self, array: Array) -> None:
        self._reduce(array, ReduceOp.SUM)

    def _reduce(self, array: npt.NDArray[Any], operation: ReduceOp.RedOpType) -> None:
        assert self._manager is not None
        work = self._manager.allreduce(torch.from_numpy(array), reduce_op=operation)
        work.wait()
        if self._manager.errored() is not None:
            raise self._lost("a collective operation failed")

    def finish(self, version: Version, *, committed: bool) -> None:
        if self._manager is None:
            return
        self._counter = version.counter()
        if not committed and self._manager.errored() is None:
            # agreed to go without this step: the group is sound
            self._manager.load_state_dict({"step": self._counter, "batches_committed": 0})
            return
        # resets or raises torchft's failure counter, which makes the next quorum form a fresh group after a failure
        try:
            self._manager.should_commit()
        except (RuntimeError, TimeoutError) as error:
            _log.warning("the collective is opened anew", error=repr(error))
            self.close()
            return
        self._manager.load_state_dict({"step": self._counter, "batches_committed": 0})

    def _lost(self, what: str) -> StepLost:
        error = self._manager.errored() if self._manager else None
        if self._group is not None:
            # the others see the closed connections at once instead of waiting for the collective timeout
            self._group.abort(errored=False)
        cause = repr(error.original_exception) if error else "no cause given"
        return StepLost(f"{what}: {cause}")

    def _open(self) -> tuple[torchft.Manager, ProcessGroupGloo]:
        if self._manager is not None and self._group is not None:
            return self._manager, self._group
        time.sleep(max(0.0, self._left_at + self._times.rejoin - time.monotonic()))
        host = self._host or interfaces.towards(self._lighthouse)
        # gloo asks the machine's name for its address, which may be one that the others do not reach
        name = interfaces.interface(host)
        if name:
            os.environ["GLOO_SOCKET_IFNAME"] = name
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        self._group = ProcessGroupGloo(timeout=timedelta(seconds=self._times.collective))
        self._manager = torchft.Manager(
            pg=self._group,
            load_state_dict=self._take_state,
            state_dict=self._give_state,
            min_replica_size=1,
            # a member heals before the step, so that it counts in full from its first one
            use_async_quorum=False,
            timeout=timedelta(seconds=self._times.collective),
            quorum_timeout=timedelta(seconds=self._times.quorum),
            connect_timeout=timedelta(seconds=self._times.connect),
            rank=0,
            world_size=1,
            store_addr=host,
            store_port=store.port,
            lighthouse_addr=self._lighthouse,
            replica_id=self._id,
            hostname=host,
            heartbeat_interval=timedelta(seconds=self._times.heartbeat_interval),
            checkpoint_transport=StateTransport(host, self._secret),
            init_sync=False,
        )
        self._store = store
        return self._manager, self._group

    def _give_state(self) -> dict[str, object]:
        return {"arrays": self._state(), "counter": self._counter}

    def _take_state(self, state: Any) -> None:
        self._load_state(state["arrays"], int(state["counter"]))
        self._healed = True

    def close(self) -> None:
        manager, self._manager = self._manager, None
        group, self._group = self._group, None
        if manager is not None:
            self._left_at = time.monotonic()
            manager.shutdown(wait=False)
        if group is not None:
            group.abort(errored=False)
            group.shutdown()
