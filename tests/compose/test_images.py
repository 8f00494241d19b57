"""The built images: what is in them, what is not, and that each service starts in its own."""

import functools
import json
import re
import subprocess
import tarfile
import tempfile
import time

import pytest

from tests.support.docker import ROOT, VERSION, docker

pytestmark = pytest.mark.compose

NAMES = ["scheduler", "toolenv", "worker"]
PROFILE = ROOT / "deploy" / "toolenv-seccomp.json"
CONFINED = ["--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--read-only"]
FOR_BUBBLEWRAP = [
    "--security-opt", f"seccomp={PROFILE}", "--security-opt", "systempaths=unconfined",
    "--security-opt", "apparmor=unconfined",
]  # fmt: skip
USABLE = "import asyncio; from services.toolenv.sandbox.bubblewrap import usable; print(asyncio.run(usable()))"


def run(name, *command, options=(), check=True):
    return docker("run", "--rm", "--network", "none", *options, f"libra/{name}:{VERSION}", *command, check=check)


@functools.cache
def files(name):
    """{path: owner} of all files of an image, as they lie in a container of it."""
    container = docker("create", f"libra/{name}:{VERSION}").strip()
    try:
        with tempfile.TemporaryFile() as archive:
            subprocess.run(["docker", "export", container], check=True, stdout=archive, timeout=110)
            archive.seek(0)
            with tarfile.open(fileobj=archive) as members:
                return {m.name: m.uid for m in members if not m.isdir()}
    finally:
        docker("rm", container)


@pytest.mark.parametrize("name", NAMES)
def test_runs_as_a_user_without_rights(images, name):
    assert images[name]["Config"]["User"] == "10001:10001"
    assert run(name, "id", "-u").strip() == "10001"
    # nor can it become anybody, nor change what it runs
    assert (
        run(name, "sh", "-c", "for f in /opt/libra /opt/libra/bin /etc/libra /usr; do test ! -w $f || echo $f; done")
        == ""
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_new_volume_belongs_to_the_user(images, name):
    volume = docker("volume", "create").strip()
    try:
        run(name, "sh", "-c", "echo kept >/var/lib/libra/file", options=["-v", f"{volume}:/var/lib/libra", *CONFINED])
        kept = run(name, "cat", "/var/lib/libra/file", options=["-v", f"{volume}:/var/lib/libra", *CONFINED])
        assert kept == "kept\n"
    finally:
        docker("volume", "rm", volume)


@pytest.mark.parametrize("name", NAMES)
def test_says_what_it_is(images, name):
    config = images[name]["Config"]
    labels = {k.removeprefix("org.opencontainers.image."): v for k, v in config["Labels"].items()}
    assert labels["title"].startswith("Libra ")
    assert labels["version"] == VERSION
    assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?|unknown", labels["revision"])
    assert labels["source"]
    assert config["Healthcheck"]["Test"][-2:] == ["--ready-dir", "/run/libra"]
    assert config["Entrypoint"][0] == "/usr/bin/tini"
    assert "PYTHONUNBUFFERED=1" in config["Env"]


@pytest.mark.parametrize("name", ["scheduler", "toolenv"])
def test_no_torch_and_no_database_driver_where_none_is_used(images, name):
    unwanted = ["torch", "transformers", "torchft", "matplotlib", "pytest", "grpc_tools", "pip"]
    unwanted += ["psycopg"] if name == "toolenv" else []
    program = f"import importlib.util as u; print([m for m in {unwanted} if u.find_spec(m)])"
    assert run(name, "python", "-c", program) == "[]\n"


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("scheduler", "services.scheduler"),
        ("toolenv", "services.toolenv"),
        ("worker", "services.node"),
        ("worker", "services.rollout"),
        ("worker", "services.trainer"),
        ("worker", "services.trainer.lighthouse"),
    ],
)
def test_each_service_starts(images, name, module):
    assert "--config" in run(name, "python", "-m", module, "--help", options=CONFINED)


def test_the_scheduler_has_what_postgres_and_the_command_need(images):
    run("scheduler", "python", "-c", "import services.scheduler.__main__, services.scheduler.store, psycopg")
    for command in ("status", "events", "explain"):
        assert "Usage" in run("scheduler", "libra", command, "--help")


def test_the_worker_trains_without_a_gpu(images):
    program = "import torch, torchft, transformers, matplotlib; print(torch.version.cuda, torch.ones(2).sum().item())"
    assert run("worker", "python", "-c", program) == "None 2.0\n"


def test_size_of_the_scheduler(images):
    assert images["scheduler"]["Size"] - size_of_base() < 300e6


def size_of_base():
    """What the scheduler image is built on: all layers before the first of Libra's own, which installs tini."""
    total = 0
    history = docker("history", "--no-trunc", "--human=false", "--format", "{{json .}}", f"libra/scheduler:{VERSION}")
    for line in reversed(history.splitlines()):
        layer = json.loads(line)
        if "tini" in layer["CreatedBy"]:
            return total
        total += int(layer["Size"])
    pytest.fail("the layer that installs tini is not in the image's history")


@pytest.mark.parametrize("name", NAMES)
def test_nothing_was_left_behind(images, name):
    secret = re.compile(
        r"(^|/)\.git(/|$)|(^|/)\.venv(/|$)|\.env$|^root/\.(cache|config|ssh|docker)/|pip/cache|^wheels/|^src/|^opt/tools/"
        r"|^var/lib/apt/lists/.|^var/cache/apt/.|\.(pem|key|p12|pfx)$|(^|/)id_(rsa|ed25519|ecdsa)"
    )
    # certificates of authorities are public, whatever their files are called
    public = re.compile(
        r"^etc/ssl/certs/|^usr/lib/ssl/cert\.pem$|^usr/share/ca-cert|/certifi/cacert\.pem$|/_credentials/roots\.pem$"
    )
    assert [path for path in files(name) if secret.search(path) and not public.search(path)] == []


@pytest.mark.parametrize("name", NAMES)
def test_what_it_runs_belongs_to_root(images, name):
    assert [path for path, owner in files(name).items() if path.startswith("opt/") and owner != 0] == []


@pytest.mark.parametrize("name", NAMES)
def test_the_health_check_works_in_it(images, name):
    probe = images[name]["Config"]["Healthcheck"]["Test"][1:]
    result = run(name, *probe, options=CONFINED, check=False)
    assert (result.returncode, result.stderr) == (1, "unhealthy: /run/libra: no service is ready yet\n")


def test_python_sandboxes_work_with_these_options(images):
    said = run("toolenv", "python", "-c", USABLE, options=[*CONFINED, *FOR_BUBBLEWRAP, "--tmpfs", "/tmp"])
    assert said == "None\n"


@pytest.fixture
def service(images, tmp_path):
    """start(image, configuration, *options) runs a service with a fast health check; its container's name."""
    started = []

    def start(name, configuration, *options):
        file = tmp_path / f"{name}.yaml"
        file.write_text(f"ready_file: /run/libra/{name}\n{configuration}")
        file.chmod(0o644)  # the user in the container is another one
        container = docker(
            "run", "--detach", "--network", "none", "--health-interval", "1s", *CONFINED, *options,
            "--tmpfs", "/run/libra:uid=10001,mode=755", "--tmpfs", "/var/lib/libra:uid=10001,mode=755",
            "--volume", f"{file}:/etc/libra/{name}.yaml:ro", f"libra/{name}:{VERSION}",
        ).strip()  # fmt: skip
        started.append(container)
        return container

    yield start
    docker("rm", "--force", "--volumes", *started)


@pytest.mark.parametrize(
    ("name", "configuration", "options"),
    [
        ("scheduler", "listen: 0.0.0.0:7070", []),
        ("toolenv", "listen: 0.0.0.0:7099\nenvironment: python", [*FOR_BUBBLEWRAP, "--tmpfs", "/tmp"]),
    ],
)
def test_a_service_becomes_healthy_and_ends_when_told(service, name, configuration, options):
    container = service(name, configuration, *options)
    deadline = time.monotonic() + 60
    while (health := inspect(container)["Health"]["Status"]) != "healthy":
        assert health == "starting", docker("logs", container)
        assert time.monotonic() < deadline, docker("logs", container)
        time.sleep(0.2)
    docker("stop", "--time", "30", container)
    assert inspect(container)["ExitCode"] == 0, docker("logs", container)


def test_a_sandbox_that_cannot_work_says_which_options_it_needs(service):
    container = service("toolenv", "environment: python", "--tmpfs", "/tmp")
    assert docker("wait", container).strip() == "2"
    said = docker("logs", container, check=False).stderr
    assert "seccomp=deploy/toolenv-seccomp.json and systempaths=unconfined" in said


def inspect(container):
    return json.loads(docker("inspect", container))[0]["State"]


@pytest.mark.parametrize("option", range(0, len(FOR_BUBBLEWRAP) - 2, 2))
def test_python_sandboxes_need_each_of_them(images, option):
    """The last one matters on hosts with AppArmor only."""
    rest = FOR_BUBBLEWRAP[:option] + FOR_BUBBLEWRAP[option + 2 :]
    said = run("toolenv", "python", "-c", USABLE, options=[*CONFINED, *rest, "--tmpfs", "/tmp"])
    assert "bubblewrap does not work here" in said
