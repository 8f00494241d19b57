"""The cluster of compose.yaml, for real: the commands of docs/deploy.md in their order, while services are killed.

One story in ordered tests: up, the main job with kills of every kind of container and a change of scale in the midst of
it, its guarantees, metrics and board, the rest of the guide, and nothing left at the end.
"""

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from pathlib import Path

import pytest

from services.client import LibraClient
from services.common import wire
from services.common.errors import LibraError
from tests.support import compose as support
from tests.support.compose import Project
from tests.support.docker import ROOT, VERSION, docker

pytestmark = pytest.mark.compose

GUIDE = support.blocks((ROOT / "docs" / "deploy.md").read_text())
UP_SECONDS = 300.0
RUN_SECONDS = 1_200.0
STEPS = 20
KILLS = ((2, "rollout"), (3, "toolenv"), (5, "scheduler"), (7, "hybrid"), (9, "postgres"), (11, "trainer"))
"""From which version on which container gets SIGKILL; each waits for a step since the one before."""
LATER_KILLS = ((13, "lighthouse"), (14, "prometheus"))
SCALE_UP, SCALE_DOWN = 4, 12
LOCAL = {
    "PYTHON_IMAGE": "libra-local/python:bookworm", "POSTGRES_IMAGE": "libra-local/postgres:15",
    "PROMETHEUS_IMAGE": "libra-local/prometheus:2", "TORCH_INDEX_URL": "",
}  # fmt: skip


def say(text: str) -> None:
    """The log of make test-compose shows each check."""
    print(f"compose: {text}", flush=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def project(images, tmp_path_factory):
    environment = {n: str(free_port()) for n in ("LIBRA_PORT", "PROMETHEUS_PORT", "GRAFANA_PORT")}
    environment |= {f"LIBRA_{n.upper()}_IMAGE": f"libra/{n}:{VERSION}" for n in ("scheduler", "toolenv", "worker")}
    without = ()
    if os.environ.get("LIBRA_TEST_LOCAL"):
        environment |= LOCAL | {"BUILD_NETWORK": "host"}
    if docker("image", "inspect", "grafana/grafana:11.3.1", check=False).returncode:
        without = ("grafana",)
        say("left out: grafana, whose image cannot be had here (it is not in Debian); its board's queries are tested")
    name = f"libratest{os.getpid()}"
    project = Project(name, tmp_path_factory.mktemp("compose"), environment, without)
    say(f"project {name}, {project.shell('docker compose version').splitlines()[0]}")
    try:
        yield project
    finally:
        project.compose("down", "-v", "--remove-orphans", "-t", "5")


def url(project: Project, path: str) -> str:
    return f"http://127.0.0.1:{project.environment['PROMETHEUS_PORT']}{path}"


def fetch(address: str) -> dict:
    with urllib.request.urlopen(address, timeout=10) as answer:
        return json.load(answer)


def until(what: str, condition, seconds: float, project: Project, why=lambda: ""):
    """Waits; fails with what `why` finds and the containers' words."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > deadline:
            pytest.fail(f"{what}: not within {seconds:.0f} s\n{why()}\n{project.logs()}")
        time.sleep(1.0)
    return found


def all_healthy(project: Project) -> bool:
    found = [c for c in project.containers() if c.service != "setup"]
    return bool(found) and all(c.state == "running" and c.health in ("healthy", "") for c in found)


def document(said: str) -> dict:
    """The JSON object in it; compose says on the same screen what it creates."""
    found: dict = json.loads(said[said.index("{") : said.rindex("}") + 1])
    return found


def demo_summary(project: Project) -> dict:
    return document(project.compose("run", "--rm", "-T", "--entrypoint", "cat", "libra", "runs/demo/summary.json"))


# ---- the story


def test_the_file_is_clean_under_both_versions(tmp_path):
    found = [shutil.which("docker-compose"), second_version(tmp_path)]
    binaries = [[str(path)] for path in found if path]
    if not binaries:
        pytest.skip("no compose is installed")
    files_of = (["compose.yaml"], *(["compose.yaml", f"deploy/compose.{n}.yaml"] for n in ("gpu", "python")))
    for binary in binaries:
        for files in files_of:
            command = [*binary, *(a for f in files for a in ("-f", f)), "config", "--quiet"]
            done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=60)
            assert done.returncode == 0, f"{command}: {done.stderr}"
            assert not done.stderr.strip(), f"{command}: {done.stderr}"
        version = subprocess.run([*binary, "version", "--short"], check=False, capture_output=True, text=True)
        say(f"the compose files are clean under compose {version.stdout.strip()}")


def second_version(folder: Path) -> Path | None:
    """Compose v2 out of Debian's next release, unpacked, not installed; None (and said) if it cannot be had."""
    try:
        sources = "".join(p.read_text() for p in Path("/etc/apt").glob("sources.list*/**/*") if p.is_file())
        sources += Path("/etc/apt/sources.list").read_text() if Path("/etc/apt/sources.list").exists() else ""
        mirror = re.findall(r"https?://\S+/debian(?=\s|$)", sources)[0]
        package = f"{mirror}/pool/main/d/docker-compose/docker-compose_2.26.1-4_amd64.deb"
        with urllib.request.urlopen(package, timeout=60) as answer:
            (folder / "compose.deb").write_bytes(answer.read())
        subprocess.run(["dpkg-deb", "-x", "compose.deb", "v2"], cwd=folder, check=True, timeout=60)
    except (OSError, IndexError, subprocess.SubprocessError) as error:
        say(f"left out: Compose v2, which cannot be had here ({error!r})")
        return None
    return folder / "v2" / "usr" / "libexec" / "docker" / "cli-plugins" / "docker-compose"


def test_up_in_the_order_of_health(project):
    began = time.monotonic()
    for block in GUIDE["Up"]:
        project.shell(block, UP_SECONDS + 300)
    until("all healthy", lambda: all_healthy(project), UP_SECONDS, project)
    say(f"up and healthy after {time.monotonic() - began:.0f} s: " + ", ".join(c.service for c in project.containers()))
    assert {c.service for c in project.containers()} == {*support.SERVICES, "setup"} - set(project.without)
    project.compose("up", "-d", "--no-recreate", "--scale", "rollout=2", *rest(project))
    until("two rollout containers", lambda: len(project.containers("rollout")) == 2, 60, project)


def rest(project: Project) -> list[str]:
    """Names the services where one is left out."""
    return [s for s in support.SERVICES if s not in project.without] if project.without else []


def test_containers_are_confined(project):
    networks = {c.service: set(c.networks) for c in project.containers()}
    assert networks["postgres"] == {"db"}
    assert networks["toolenv"] == {"tools"}
    internal = {
        n: docker("network", "inspect", "-f", "{{.Internal}}", f"{project.name}_{n}").strip() for n in ("db", "tools")
    }
    assert internal == {"db": "true", "tools": "true"}
    code = "import socket; socket.getaddrinfo('postgres', 1)"
    done = docker("exec", project.containers("toolenv")[0].id, "python", "-c", code, check=False)
    assert done.returncode != 0
    assert "gaierror" in done.stderr
    code = "import socket; socket.create_connection(('9.9.9.9', 53), 3)"
    assert docker("exec", project.containers("toolenv")[0].id, "python", "-c", code, check=False).returncode != 0
    for container in project.containers():
        if container.service in ("postgres", "grafana", "setup", "prometheus"):
            continue
        user, capabilities = docker("exec", container.id, "sh", "-c", "id -u; grep CapEff /proc/1/status").splitlines()
        assert (user, capabilities.split()[1]) == ("10001", "0000000000000000")
    published = [
        b["HostIp"]
        for c in project.containers()
        for ports in json.loads(docker("inspect", "-f", "{{json .HostConfig.PortBindings}}", c.id)).values()
        for b in ports
    ]
    assert published
    assert set(published) == {"127.0.0.1"}
    say("toolenv reaches neither database nor internet; services run as 10001 without capabilities; ports on loopback")


async def versions(project: Project) -> dict[str, int]:
    """Head of each training run."""
    async with LibraClient(f"127.0.0.1:{project.environment['LIBRA_PORT']}", retry_for_s=1.0) as client:
        listed = await client.list_resources(wire.RESOURCE_KIND_RUN)
        return {
            r.run.name: r.run.policies[0].head.number for r in listed.resources if r.run.kind == wire.RUN_KIND_TRAIN
        }


def head(project: Project) -> int:
    """Newest version of the main job; -1 while nobody says so."""
    try:
        return max(asyncio.run(versions(project)).values(), default=-1)
    except LibraError:
        return -1


def test_the_main_job_survives_a_kill_of_every_kind_and_a_change_of_scale(project, tmp_path):
    output = tmp_path / "demo.log"
    process = project.start(GUIDE["Run"][0], output)
    plan = [*KILLS, *LATER_KILLS]
    scales = [(SCALE_UP, 4), (SCALE_DOWN, 1)]
    last, began = -1, time.monotonic()
    try:
        while process.poll() is None:
            assert time.monotonic() - began < RUN_SECONDS, f"the main job did not end\n{output.read_text()[-4_000:]}"
            time.sleep(1.0)
            now = head(project)
            if scales and now >= scales[0][0]:
                count = scales.pop(0)[1]
                project.compose("up", "-d", "--no-recreate", "--scale", f"rollout={count}", *rest(project))
                say(f"step {now}: rollout scaled to {count}")
            elif plan and now >= plan[0][0] and now > last:
                victim = project.containers(plan[0][1])[0]
                if victim.state == "running":
                    project.crash(victim)
                    say(f"step {now}: SIGKILL to {victim.service} {victim.id[:12]}")
                    plan.pop(0)
                    last = now
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(30)
    said = output.read_text()
    assert process.returncode == 0, f"{said[-6_000:]}\n{project.logs()}"
    assert "every promise holds" in said
    assert not plan, f"not killed: {plan}"
    assert not scales
    say("the main job ended, every promise holds:\n" + said[said.rindex("  reward (held-out)") :])


def test_the_summary_keeps_the_guarantees(project):
    for block in GUIDE["Run"][1:2]:
        project.shell(block.replace("> report.html", "> /dev/null"))
    summary = demo_summary(project)
    assert summary["steps"] == STEPS
    zeros = ("tokens_lost", "trained_twice", "segments_mismatched")
    assert {n: summary[n] for n in zeros} == dict.fromkeys(zeros, 0)
    assert summary["max_staleness"] <= summary["staleness_bound"]
    assert summary["eval_reward_end"] >= 0.85 > 0.62 >= summary["eval_reward_start"]
    say(
        f"reward {summary['eval_reward_start']} -> {summary['eval_reward_end']}, staleness {summary['max_staleness']} of "
        f"{summary['staleness_bound']}, preemptions {summary['preemptions']}, regenerated {summary['tokens_regenerated']}"
    )


def test_scaled_down_workers_moved_their_work_and_left(project):
    until("one rollout container", lambda: len(project.containers("rollout")) == 1, 60, project)
    names = {c.id[:12] for c in project.containers() if c.service in ("rollout", "trainer", "hybrid")}

    def held() -> set[str]:
        status = document(project.compose("run", "--rm", "-T", "libra", "status", "--json"))
        return set(re.findall(r"nodes/[a-z]+-([0-9a-f]{12})/accelerators/0", str(status["accelerators"])))

    def why() -> str:
        said = [
            f"left: {sorted(names)}, held: {sorted(held())}",
            project.compose("run", "--rm", "-T", "libra", "status"),
        ]
        kinds = ("nodes", "replicas", "reassignments", "workers")
        said += [project.compose("run", "--rm", "-T", "libra", "events", "--prefix", f"{kind}/") for kind in kinds]
        return "\n".join(text[-6_000:] for text in said)

    until("only the accelerators of the containers that are left", lambda: held() == names, 60, project, why)
    say(f"the accelerators of the cluster are those of its {len(names)} containers; three have left")


def test_prometheus_has_every_target(project):
    until("all healthy again", lambda: all_healthy(project), UP_SECONDS, project)

    def up() -> dict[str, str] | None:
        try:
            targets = fetch(url(project, "/api/v1/targets"))["data"]["activeTargets"]
        except OSError:
            return None
        found = {t["labels"]["job"] + " " + t["labels"]["instance"]: t["health"] for t in targets}
        jobs = {name.split()[0] for name in found}
        wanted = {"scheduler", "toolenv", "node", "rollout", "trainer"}
        return found if wanted <= jobs and set(found.values()) == {"up"} else None

    found = until("every target up", up, 90, project)
    say(f"Prometheus has {len(found)} targets, all up")


def test_the_boards_queries_return_data(project):
    board = json.loads((ROOT / "deploy" / "grafana" / "dashboards" / "libra.json").read_text())
    queries = [(p.get("title", ""), t["expr"]) for p in panels(board) for t in p.get("targets", []) if "expr" in t]
    assert len(queries) > 8
    # what there is no data of unless it happened, and then perhaps for one scrape only
    optional = ["count(up) - sum(up)"]
    moved = [m for m in demo_summary(project)["reassignment_list"] if m["asked_by"] == "planner"]
    if not moved:
        optional.append("libra_planner_gain")
        say("the planner moved nothing, so the board shows no gain")
    empty = []
    for title, written in queries:
        expression = written.replace("$__rate_interval", "1m").replace("$__interval", "15s").replace("$__range", "30m")
        query = urllib.parse.urlencode(
            {"query": expression, "start": time.time() - 1_800, "end": time.time(), "step": "15"}
        )
        answer = fetch(url(project, f"/api/v1/query_range?{query}"))
        if not answer["data"]["result"] and not any(o in written for o in optional):
            empty.append(f"{title}: {expression}")
    assert not empty, "\n".join(empty)
    say(f"the board's {len(queries)} queries return data")


def panels(board: dict) -> list[dict]:
    return [q for p in board["panels"] for q in (p, *p.get("panels", []))]


@pytest.mark.parametrize("heading", ["Run", "Watch", "Scale", "Break", "Look inside"])
def test_the_guides_commands_run(project, heading):
    for block in GUIDE[heading][2 if heading == "Run" else 0 :]:
        output = project.shell(block.replace("> report.html", "> /dev/null"), 400)
        say(f"{heading}: " + "; ".join(block.strip().splitlines()) + f"\n{output[-600:]}")
    until("healthy after the guide's commands", lambda: all_healthy(project), UP_SECONDS, project)


def test_gpu_file_is_read(project):
    for block in GUIDE["GPU"]:
        project.shell(block)
    say("GPU: the file is read; no GPU here, so nothing was started with it")


def test_update_and_down_leave_nothing(project):
    for block in GUIDE["Update"]:
        project.shell(block, 900)
    until("healthy after the update", lambda: all_healthy(project), UP_SECONDS, project)
    first, second = GUIDE["Down"][0].strip().splitlines()
    assert "-v" in second
    project.shell(first)
    assert project.left()["volumes"]
    assert not project.left()["containers"]
    project.shell(second)
    assert project.left() == {"containers": [], "volumes": [], "networks": []}
    say("down -v left no container, volume or network")
