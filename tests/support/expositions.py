"""What every service shows at /metrics, built without starting the services, and read back as a scraper would."""

import asyncio
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from services.common.blobs import BlobStore
from services.common.history import History
from services.common.metrics import Exposition
from services.node.agent import NodeAgent
from services.node.config import NodeConfig
from services.node.exposition import expose as expose_node
from services.rollout.agent import RolloutAgent
from services.rollout.config import RolloutConfig
from services.rollout.engine.fake import FakeCore
from services.rollout.engine.thread import Engine
from services.rollout.exposition import expose as expose_rollout
from services.toolenv.exposition import Tally
from services.toolenv.exposition import expose as expose_toolenv
from services.trainer.agent import TrainerAgent
from services.trainer.config import Config
from services.trainer.engine.fake import FakeEngine
from services.trainer.exposition import expose as expose_trainer
from tests.support.robots import Cluster

SUFFIXES = {"counter": ("",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@dataclass(frozen=True)
class Described:
    """A metric as its registry knows it, whether it has series yet or not."""

    name: str
    type: str
    labels: tuple[str, ...]

    @property
    def series(self) -> tuple[str, ...]:
        """Names under which it can be asked for."""
        return tuple(self.name + suffix for suffix in SUFFIXES[self.type])


def rollout_agent(folder: Path) -> RolloutAgent:
    config = RolloutConfig(
        worker="rollout-1", scheduler="127.0.0.1:1", accelerators=["nodes/n0/accelerators/1"],
        locks=str(folder / "locks"), blobs=str(folder / "blobs"),
    )  # fmt: skip
    return RolloutAgent(
        config, Engine(FakeCore(lambda ids: ids[-1])), BlobStore(config.blobs), History(None, "rollout-1")
    )


def trainer_agent(folder: Path) -> TrainerAgent:
    config = Config.model_validate(
        {
            "worker": "trainer-0", "scheduler": "127.0.0.1:1", "accelerators": ["nodes/n0/accelerators/0"],
            "lock_dir": str(folder / "locks"), "blobs": str(folder / "blobs"),
            "collective": {"lighthouse": "127.0.0.1:1"},
        }
    )  # fmt: skip
    store = BlobStore(config.blobs)
    return TrainerAgent(config, FakeEngine(), store, History(None, "trainer-0"), on_failure=lambda _: None)


def node_agent(folder: Path) -> NodeAgent:
    return NodeAgent(
        NodeConfig.model_validate(
            {
                "scheduler": "127.0.0.1:1", "node": "n0", "locks": str(folder / "locks"),
                "accelerators": [{"index": 0, "pool": "HYBRID", "memory_mib": 512}],
                "workers": [
                    {
                        "name": "w", "argv": ["true"], "accelerators": ["nodes/n0/accelerators/0"],
                        "ready_file": str(folder / "ready"), "log": str(folder / "log"),
                    }
                ],
            }
        )
    )  # fmt: skip


@asynccontextmanager
async def expositions(folder: Path) -> AsyncIterator[dict[str, Exposition]]:
    """The exposition of each service."""
    node = node_agent(folder)
    node.measure()
    cluster = Cluster(folder, metrics_listen="127.0.0.1:0")
    await cluster.start()
    try:
        made = {
            "scheduler": cluster.scheduler.metrics.exposition,
            "rollout": expose_rollout(rollout_agent(folder)),
            "trainer": expose_trainer(trainer_agent(folder)),
            "toolenv": expose_toolenv("calculator", Tally(("calculate",)), ()),
            "node": expose_node(node),
        }
        for exposition in made.values():
            exposition.refresh()
        yield made
    finally:
        await cluster.stop()
        await node.session.channel.close()


def described(exposition: Exposition) -> set[Described]:
    """Every metric of a registry."""
    found = set()
    for collector in exposition.registry._collector_to_names:
        for family in collector.collect():
            labels = getattr(collector, "_labelnames", None) or getattr(family, "_labelnames", ())
            name = family.name + ("_total" if family.type == "counter" else "")
            found.add(Described(name, family.type, tuple(labels)))
    return found


def samples(text: str) -> Samples:
    """The samples of an exposition's text by name and sorted labels."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def now(exposition: Exposition) -> Samples:
    """What it shows if it looks now."""
    exposition.refresh()
    return samples(generate_latest(exposition.registry).decode())


def value(found: Samples, name: str, **labels: str) -> float | None:
    """One sample; None if there is none."""
    return found.get((name, tuple(sorted(labels.items()))))


async def scrape(address: str, path: str = "/metrics") -> str:
    """The text that is served."""

    def read() -> str:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=10) as answer:
            return answer.read().decode()

    return await asyncio.to_thread(read)
