"""The docker client, for tests of the images."""

import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def docker(*arguments, check=True, timeout=110):
    """Runs the docker client; its standard output, or all of the result if a failure may be expected."""
    result = subprocess.run(["docker", *arguments], check=False, capture_output=True, text=True, timeout=timeout)
    if not check:
        return result
    assert result.returncode == 0, f"docker {' '.join(arguments)}: {result.stdout}{result.stderr}"
    return result.stdout
