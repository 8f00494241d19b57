"""A Docker engine with the built images, or the reason why there is none."""

import json
import signal
import subprocess

import pytest

from tests.support.docker import ROOT, VERSION, docker


@pytest.fixture(scope="session", autouse=True)
def tidy_when_told_to_end():
    """SIGTERM, as from a time limit, ends the tests like Ctrl-C: what they started is taken down."""

    def interrupt(number, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="session")
def engine():
    status = ROOT / "deploy" / "images" / "engine.sh"
    result = subprocess.run(["sh", status, "status"], check=False, capture_output=True, text=True, timeout=60)
    if result.returncode:
        pytest.skip(f"{result.stdout.strip()}; deploy/images/engine.sh start")


@pytest.fixture(scope="session")
def images(engine):
    """What the engine says about each image, by name."""
    found = {}
    for name in ("scheduler", "toolenv", "worker"):
        result = docker("image", "inspect", f"libra/{name}:{VERSION}", check=False)
        if result.returncode:
            pytest.skip(f"libra/{name}:{VERSION} is not built; deploy/images/build.sh")
        found[name] = json.loads(result.stdout)[0]
    return found
