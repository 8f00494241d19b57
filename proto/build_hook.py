"""Hatch build hook: turns proto/libra/v1/*.proto into the Python package libra.v1 under proto/gen (git-ignored)."""

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
    bin_dir = Path(sys.executable).parent
    plugins = [
        f"--plugin=protoc-gen-{name}={bin_dir / f'protoc-gen-{name}'}"
        for name in ("mypy", "mypy_grpc")
        if (bin_dir / f"protoc-gen-{name}").exists()
    ]
    typed = [f"--{p.split('=')[1].removeprefix('protoc-gen-')}_out={destination}" for p in plugins]
    code = protoc.main(
        [
            "protoc",
            f"-I{HERE}",
            f"-I{Path(grpc_tools.__file__).parent / '_proto'}",
            f"--python_out={destination}",
            f"--grpc_python_out={destination}",
            *plugins,
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
