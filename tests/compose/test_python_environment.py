"""docs/deploy.md's "Python tools" under Compose 2, where that can be had: the sandbox works in its container."""

import time

import pytest

from tests.compose.test_cluster import GUIDE, LOCAL, say, second_version
from tests.support.compose import Project
from tests.support.docker import VERSION, docker

pytestmark = pytest.mark.compose

CODE = """
import asyncio
from services.common import wire
from services.common.rpc.channel import connect

async def main():
    async with connect("127.0.0.1:7080") as channel:
        stub = wire.ToolEnvServiceStub(channel)
        print((await stub.Describe(wire.DescribeRequest(), timeout=10)).environment)

asyncio.run(main())
"""


def test_the_python_environment_starts_with_its_sandbox(images, tmp_path):
    plugin = second_version(tmp_path)
    if plugin is None:
        pytest.skip("no Compose 2 here; 1.29 refuses an option that the sandbox needs")
    environment = LOCAL | {"LIBRA_TOOLENV_IMAGE": f"libra/toolenv:{VERSION}"}
    project = Project(f"libratestpython{int(time.time())}", tmp_path, environment, compose=str(plugin))
    try:
        for block in GUIDE["Python tools"]:
            project.shell(block)
        deadline = time.monotonic() + 90
        while (found := project.containers("toolenv-python")[0]).health != "healthy":
            assert time.monotonic() < deadline, project.logs()
            time.sleep(1)
        assert docker("exec", found.id, "python", "-c", CODE).strip() == "python"
        say("the python environment is up in its container: its sandbox works there")
    finally:
        project.shell("docker compose -f compose.yaml -f deploy/compose.python.yaml down -v")
