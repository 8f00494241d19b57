"""Hatch build hook: turns proto/libra/v1/*.proto into the Python package libra.v1 under proto/gen (git-ignored)."""

import os
import shutil
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

HERE = Path(__file__).resolve().parent


def generate(destination: Path) -> None:
    """Compiles all protos with grpcio-tools and mypy-protobuf; raises RuntimeError with protoc's exit code."""
    import grpc_tools
    from grpc_tools import protoc

    shutil.rmtree(destination, ignore_errors=True)
    destination.mkdir(parents=True)
    # in pip's isolated build the plugins are on PATH only; run by hand, they lie beside the interpreter
    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    typed = []
    for name in ("mypy", "mypy_grpc"):
        plugin = shutil.which(f"protoc-gen-{name}", path=search)
        if plugin is None:
            raise RuntimeError(f"protoc-gen-{name} not found; install mypy-protobuf beside grpcio-tools")
        typed += [f"--plugin=protoc-gen-{name}={plugin}", f"--{name}_out=quiet:{destination}"]
    code = protoc.main(
        [
            "protoc",
            f"-I{HERE}",
            f"-I{Path(grpc_tools.__file__).parent / '_proto'}",
            f"--python_out={destination}",
            f"--grpc_python_out={destination}",
            *typed,
            *sorted(str(p) for p in (HERE / "libra" / "v1").glob("*.proto")),
        ]
    )
    if code:
        raise RuntimeError(f"protoc failed with exit code {code}; its message stands above")
    for package in (destination / "libra", destination / "libra" / "v1"):
        (package / "__init__.py").write_text('"""Generated from proto/; do not edit."""\n')
        (package / "py.typed").touch()


class ProtoBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Runs before each wheel or editable build."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        generate(Path(self.root) / "proto" / "gen")
