"""The compose files against their settings: what .env.example offers is used, and what is used stands there."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
FILES = [ROOT / "compose.yaml", *sorted((ROOT / "deploy").glob("compose.*.yaml"))]
CONFIGS = sorted((ROOT / "deploy" / "config").glob("*.yaml"))
VARIABLE = re.compile(r"(?<!\$)\$\{([A-Z_]+)(?::-([^}]*))?\}")


def offered() -> dict[str, str]:
    return dict(re.findall(r"^#([A-Z_]+)=(.*)$", (ROOT / ".env.example").read_text(), re.MULTILINE))


def used(paths: list[Path]) -> dict[str, str]:
    return {name: default for path in paths for name, default in VARIABLE.findall(path.read_text())}


def test_the_settings_offered_are_those_that_the_files_use():
    assert set(offered()) == set(used(FILES)) - {"LIBRA_VERSION"}


def test_the_defaults_shown_are_those_that_hold():
    within = used(CONFIGS)
    for name, default in used(FILES).items():
        if name != "LIBRA_VERSION":
            # an empty one is passed on to a container, whose configuration then has the default
            assert offered()[name] == (default or within.get(name, "")), name


def test_each_variable_of_a_configuration_reaches_its_service():
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    for path in CONFIGS:
        given = set(services.get(path.stem, {}).get("environment", {})) | {"HOSTNAME"}
        assert set(used([path])) <= given, path.name


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_nothing_is_privileged_and_ports_are_on_loopback(path):
    for name, service in yaml.safe_load(path.read_text())["services"].items():
        assert not service.get("privileged"), name
        assert all(str(port).startswith("127.0.0.1:") for port in service.get("ports", [])), name
