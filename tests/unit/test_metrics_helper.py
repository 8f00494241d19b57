"""Serving a registry: addresses, refusals, a loop that hangs, a clean end."""

import asyncio
import threading
import urllib.error

import pytest
from prometheus_client import Counter

from services.common import config, metrics
from services.common.errors import ConfigError
from services.common.metrics import Exposition, counter, gauge, short
from services.node.config import NodeConfig
from services.rollout.config import RolloutConfig
from services.scheduler.config import SchedulerConfig
from services.toolenv.config import ToolEnvConfig
from services.trainer.config import Config
from tests.support.expositions import samples, scrape, value


def figures():
    yield gauge("libra_some", "Some.", ["a"], {("x",): 1.0, ('q"\n',): 2.0})
    yield counter("libra_done_total", "Done.", rows={(): 3.0})


async def test_a_registry_is_served_and_the_port_is_free_afterwards():
    calls = Counter("libra_calls_total", "Calls.", ["tool"], registry=None)
    calls.labels("t").inc()
    exposition = Exposition("test", figures, [calls])
    address = await exposition.serve("127.0.0.1:0")
    assert address == exposition.address
    seen = samples(await scrape(address))
    assert value(seen, "libra_some", a="x") == 1
    assert value(seen, "libra_some", a='q"\n') == 2
    assert value(seen, "libra_done_total") == 3
    assert value(seen, "libra_calls_total", tool="t") == 1
    assert value(seen, "process_cpu_seconds_total") > 0
    (info,) = [dict(labels) for name, labels in seen if name == "libra_build_info"]
    assert info["service"] == "test"
    assert info["version"]
    with pytest.raises(urllib.error.HTTPError, match="404"):
        await scrape(address, "/")
    await exposition.stop()
    assert exposition.address == ""
    again = Exposition("test", figures)
    assert await again.serve(address) == address, "the port can be taken again at once"
    await again.stop()
    assert not [t for t in threading.enumerate() if t.name == "metrics"]


async def test_an_ipv6_address_is_served():
    exposition = Exposition("test", figures)
    try:
        address = await exposition.serve("[::1]:0")
    except ConfigError as error:
        pytest.skip(f"no IPv6 here: {error}")
    assert "libra_some" in await scrape(address)
    await exposition.stop()


async def test_nothing_is_served_without_an_address():
    exposition = Exposition("test", figures)
    assert await exposition.serve("") == ""
    await exposition.stop()


@pytest.mark.parametrize(
    ("listen", "said"),
    [
        ("9100", "expected host:port"), (":9100", "expected host:port"), ("127.0.0.1:", "expected host:port"),
        ("127.0.0.1:http", "expected host:port"), ("127.0.0.1:-1", "expected host:port"),
        ("127.0.0.1:65536", "expected host:port"), ("127.0.0.1:٣", "expected host:port"),
        ("no.such.host.invalid:9100", "is unknown"), ("192.0.2.1:9100", "cannot listen on 192.0.2.1:9100"),
    ],
)  # fmt: skip
async def test_a_wrong_address_is_refused(listen, said):
    with pytest.raises(ConfigError, match=said) as caught:
        await Exposition("test", figures).serve(listen)
    assert listen.rpartition(":")[0] in str(caught.value)


async def test_a_taken_port_is_refused():
    first = Exposition("test", figures)
    address = await first.serve("127.0.0.1:0")
    with pytest.raises(ConfigError, match=f"cannot listen on {address} .*in use.*configure another"):
        await Exposition("test", figures).serve(address)
    await first.stop()


async def test_figures_are_taken_on_the_loop_and_go_on(monkeypatch):
    monkeypatch.setattr(metrics, "REFRESH_SECONDS", 0.001)
    threads, taken = set(), asyncio.Event()

    def count():
        threads.add(threading.current_thread())
        count.calls += 1
        if count.calls > 3:
            taken.set()
        yield gauge("libra_calls", "Calls.", rows={(): count.calls})

    count.calls = 0
    exposition = Exposition("test", count)
    address = await exposition.serve("127.0.0.1:0")
    async with asyncio.timeout(10):
        await taken.wait()
    assert value(samples(await scrape(address)), "libra_calls") > 3
    await exposition.stop()
    assert threads == {threading.main_thread()}


@pytest.mark.parametrize("how", ["hangs", "fails"])
async def test_a_service_that_hangs_is_down(monkeypatch, how):
    if how == "fails":
        monkeypatch.setattr(metrics, "REFRESH_SECONDS", 0.001)
    broken = asyncio.Event()

    def once():
        if exposition.address:
            broken.set()
            raise RuntimeError("a defect")
        yield gauge("libra_some", "Some.", ["a"], {("x",): 1.0, ('q"\n',): 2.0})

    exposition = Exposition("test", once)
    address = await exposition.serve("127.0.0.1:0")
    if how == "fails":
        async with asyncio.timeout(10):
            await broken.wait()
    monkeypatch.setattr(metrics, "STALE_SECONDS", -1.0)
    with pytest.raises(urllib.error.HTTPError, match="503"):
        await scrape(address)
    await exposition.stop()


def test_resource_names_become_short_labels():
    assert short("runs/sums") == "sums"
    assert short("workers/rollout-1") == "rollout-1"
    assert short("nodes/n0/accelerators/2") == "n0/2"
    assert short("plain") == "plain"


CONFIGS = {
    SchedulerConfig: "",
    NodeConfig: "{scheduler: x, node: n, locks: l, accelerators: [{index: 0, pool: HYBRID, memory_mib: 1}]",
    RolloutConfig: "{worker: w, scheduler: x, accelerators: [a], locks: l, blobs: b",
    Config: "{worker: w, scheduler: x, accelerators: [a], lock_dir: l, blobs: b, collective: {lighthouse: h}",
    ToolEnvConfig: "{environment: calculator",
}


@pytest.mark.parametrize("model", CONFIGS)
def test_every_service_has_the_key_off_by_default_and_refuses_what_is_no_text(model):
    begun = CONFIGS[model]
    text = f"{begun}, " if begun else "{"
    assert config.loads(begun + "}" if begun else "", model, "f").metrics_listen == ""
    assert config.loads(f"{text}metrics_listen: 'h:1'}}", model, "f").metrics_listen == "h:1"
    for wrong in ("9100", "null", "[h]"):
        with pytest.raises(ConfigError, match="'metrics_listen'"):
            config.loads(f"{text}metrics_listen: {wrong}}}", model, "f")
    with pytest.raises(ConfigError, match="did you mean 'metrics_listen'"):
        config.loads(f"{text}metric_listen: 'h:1'}}", model, "f")
