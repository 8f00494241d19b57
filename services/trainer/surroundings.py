"""What a training thread is given: the replica it trains for, and everything around it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from services.common import wire
from services.common.blobs import BlobStore
from services.common.errors import LibraError
from services.common.history import History
from services.trainer.collective import Collective
from services.trainer.coordinator import Coordinator
from services.trainer.engine.base import Array, Engine
from services.trainer.metrics import MetricsFile, Phases


@dataclass(frozen=True, slots=True)
class Grant:
    """The replica that the thread trains for."""

    worker: str
    """workers/{worker}."""
    replica: str
    generation: int
    spec: wire.ReplicaSpec


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the thread works with; made by the agent."""

    desk: Callable[[Callable[[], bool], Callable[[], bool]], Coordinator]
    """Makes the door to the scheduler, given when waiting and when everything must end."""
    engine: Engine
    store: BlobStore
    pay: Callable[[], None]
    phases: Phases
    history: History
    metrics: MetricsFile
    next_run: Callable[[], wire.Run | None]
    """The run to train now."""
    roster: Callable[[], wire.Roster]
    """The newest roster that the session was told."""
    collective: Callable[[Callable[[], dict[str, Array]], Callable[[Mapping[str, Array], int], None]], Collective]
    """Makes the replica's seat, given how to copy and to take over state."""
    incident: Callable[[str, LibraError], None]
    """Tells people of something about a resource."""
    take_wait: float = 30.0
    publish_grace: float = 3.0
