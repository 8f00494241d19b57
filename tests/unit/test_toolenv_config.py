"""Configuration of the tool environment: what is wrong is refused before anything starts."""

import subprocess
import sys

import pytest

from services.common import config
from services.common.errors import ConfigError
from services.toolenv import bootstrap
from services.toolenv.config import ToolEnvConfig


def loads(text):
    return config.loads(text, ToolEnvConfig, "toolenv.yaml")


def test_the_least_configuration():
    settings = loads("environment: calculator")
    assert settings.instructions == ""
    assert not settings.unsafe
    assert settings.running() == 1024
    assert loads("environment: python").running() >= 1
    assert loads("environment: python\nmax_running: 3").running() == 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("listen: 127.0.0.1:0", r"toolenv.yaml:1: 'environment' is missing"),
        ("environment: abacus", r"toolenv.yaml:1: 'environment'.*'calculator' or 'python'"),
        ("environment: python\nmax_sesions: 3", r"toolenv.yaml:2: unknown key 'max_sesions'; did you mean 'max_ses"),
        ("environment: python\nsandbox:\n  memory: 3", r"toolenv.yaml:3: unknown key 'sandbox.memory'"),
        ("environment: python\nsandbox: {memory_mib: lots}", r"toolenv.yaml:2: 'sandbox.memory_mib'"),
        ("environment: python\ndefault_ttl_s: 9000", r"default_ttl_s 9000 is longer than max_session_life_s 7200"),
    ],
)
def test_wrong_configurations_are_refused(text, said):
    with pytest.raises(ConfigError, match=said):
        loads(text)


async def test_python_is_not_offered_without_a_sandbox(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    settings = loads("environment: python")
    with pytest.raises(ConfigError, match=r"python is not offered: bwrap is not installed.*unsafe: true"):
        await bootstrap.build_environment(settings, tmp_path)


async def test_unsafe_runs_python_without_a_sandbox(tmp_path, monkeypatch):
    async def unusable(parent):
        return "there is none"

    monkeypatch.setattr(bootstrap, "usable", unusable)
    environment = await bootstrap.build_environment(loads("environment: python\nunsafe: true"), tmp_path)
    episode = await environment.open({"question": "2+2", "answer": 4}, 1)
    result = await episode.call("1-0", "run_python", {"code": "print(2 + 2)"}, 20)
    assert result.output == "4\n"
    endless = await episode.call("1-1", "run_python", {"code": "while True: pass"}, 0.5)
    assert endless.payload_class == "timeout"
    await episode.close()
    assert list(tmp_path.iterdir()) == []


def test_the_command_ends_with_code_2_and_one_message(tmp_path):
    file = tmp_path / "toolenv.yaml"
    file.write_text("environment: calculator\nlisten: 127.0.0.1:0\nport: 3\n")
    command = [sys.executable, "-m", "services.toolenv", "--config", str(file)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert f"{file}:3: unknown key 'port'" in ended.stderr
    assert "Traceback" not in ended.stderr
