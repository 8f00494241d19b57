"""The cluster of compose.yaml under a project of its own, driven by whichever compose this machine has."""

import json
import os
import re
import shutil
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.support.docker import ROOT, docker

BLOCK = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Container:
    """What the engine says of one container."""

    id: str
    service: str
    state: str
    health: str
    """Empty if it has no health check."""
    pid: int
    restarts: int
    exit_code: int
    networks: tuple[str, ...]


class Project:
    """One compose project. `without`: services whose images cannot be had here; `compose`: the command, if not the usual."""

    def __init__(
        self, name: str, folder: Path, environment: dict[str, str], without: tuple[str, ...] = (), compose: str = ""
    ) -> None:
        self.name = name
        self.without = without
        self._shim = folder / "bin"
        self.environment = {**os.environ, **environment, "COMPOSE_PROJECT_NAME": name}
        if compose or docker("compose", "version", check=False).returncode:
            self._make_shim(compose or "docker-compose")

    def _make_shim(self, compose: str) -> None:
        """`docker compose` where it is another command, as the guide tells the readers who have 1.29."""
        self._shim.mkdir(parents=True)
        script = self._shim / "docker"
        script.write_text(
            '#!/bin/sh\nif [ "$1" = compose ]; then shift; exec ' + compose + ' "$@"; fi\n'
            f'exec {shutil.which("docker")} "$@"\n'
        )
        script.chmod(0o755)
        self.environment["PATH"] = f"{self._shim}:{self.environment['PATH']}"

    def shell(self, block: str, timeout: float = 300.0, *, check: bool = True) -> str:
        """Runs a block of the guide in the repository's root; its output."""
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", self.adapted(block)], cwd=ROOT, env=self.environment, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout, check=False,
        )  # fmt: skip
        assert done.returncode == 0 or not check, f"exit code {done.returncode} of:\n{block}\n{done.stdout[-6_000:]}"
        return done.stdout

    def start(self, block: str, output: Path) -> "subprocess.Popen[bytes]":
        """Begins a block; its output goes to a file."""
        with output.open("wb") as file:
            return subprocess.Popen(
                ["bash", "-euo", "pipefail", "-c", self.adapted(block)], cwd=ROOT, env=self.environment,
                stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def adapted(self, block: str) -> str:
        """The block as it is, but for services that cannot be had here: then the others are named."""
        if not self.without:
            return block
        others = " ".join(s for s in SERVICES if s not in self.without)
        return re.sub(r"^(docker compose up .*)$", rf"\1 {others}", block, flags=re.MULTILINE)

    def compose(self, *arguments: str, timeout: float = 300.0) -> str:
        """One compose command."""
        return self.shell(" ".join(["docker", "compose", *arguments]), timeout)

    def containers(self, service: str = "") -> list[Container]:
        """All containers of the project, those started by `run` left out."""
        label = f"label=com.docker.compose.project={self.name}"
        ids = docker("ps", "-aq", "--filter", label).split()
        if not ids:
            return []
        found = []
        for item in json.loads(docker("inspect", *ids)):
            labels, state = item["Config"]["Labels"], item["State"]
            if labels.get("com.docker.compose.oneoff", "False").lower() == "true":
                continue
            if service and labels["com.docker.compose.service"] != service:
                continue
            found.append(
                Container(
                    item["Id"], labels["com.docker.compose.service"], state["Status"],
                    state.get("Health", {}).get("Status", ""), state["Pid"], item["RestartCount"], state["ExitCode"],
                    tuple(n.removeprefix(f"{self.name}_") for n in item["NetworkSettings"]["Networks"]),
                )
            )  # fmt: skip
        return found

    def crash(self, container: Container) -> None:
        """SIGKILL to its first process, as a crash: `docker kill` would count as wanted and not be restarted."""
        # the engine may live where its process ids mean nothing here
        mounts = Path(f"/proc/{container.pid}/mountinfo").read_text()
        assert container.id in mounts, f"process {container.pid} here is not the container's"
        os.kill(container.pid, signal.SIGKILL)

    def logs(self) -> str:
        """The end of what every container said."""
        return "\n".join(
            f"--- {c.service} {c.id[:12]} {c.state} {c.health}\n"
            + docker("logs", "--tail", "25", c.id, check=False).stdout[-3_000:]
            + docker("logs", "--tail", "25", c.id, check=False).stderr[-3_000:]
            for c in self.containers()
        )

    def left(self) -> dict[str, list[str]]:
        """What there still is of the project, by kind."""
        label = f"label=com.docker.compose.project={self.name}"
        return {
            "containers": docker("ps", "-aq", "--filter", label).split(),
            "volumes": docker("volume", "ls", "-q", "--filter", label).split(),
            "networks": docker("network", "ls", "-q", "--filter", label).split(),
        }


SERVICES = (
    "postgres", "scheduler", "lighthouse", "toolenv", "rollout", "trainer", "hybrid", "prometheus", "grafana",
)  # fmt: skip
"""Those that `up` starts and that stay."""


def blocks(text: str) -> dict[str, list[str]]:
    """The command blocks of a guide, by heading."""
    found: dict[str, list[str]] = {}
    for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        heading, _, body = part.partition("\n")
        listed = BLOCK.findall(body)
        if listed:
            found[heading.strip()] = listed
    return found
