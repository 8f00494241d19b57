"""The tool environment's configuration file."""

import os
from typing import Literal

from pydantic import Field, model_validator

from services.common.config import Strict


class SandboxSection(Strict):
    """Limits of one python call, all enforced from outside the code that runs."""

    memory_mib: int = Field(512, ge=64)
    """Address space of each process, and resident memory of all processes together."""
    cpu_s: int = Field(20, ge=1)
    """Processor time of each process."""
    processes: int = Field(32, ge=1, le=4096)
    output_kib: int = Field(64, ge=1, le=256)
    """Output that the model gets to read; the rest is cut."""
    disk_mib: int = Field(64, ge=1)
    """Files of a session together, and the size of each."""
    files: int = Field(2_000, ge=10)
    """Number of files of a session."""


class ToolEnvConfig(Strict):
    """`python -m services.toolenv --config FILE`: one environment."""

    environment: Literal["calculator", "python"]
    listen: str = "127.0.0.1:0"
    ready_file: str | None = None
    instructions: str = Field("", max_length=64 << 10)
    """Text for the system message of every session; may be empty."""
    tool_timeout_s: float = Field(30.0, gt=0, le=3600)
    """Longest time of one tool call."""
    max_sessions: int = Field(4_096, ge=1, le=1_000_000)
    max_starting: int = Field(256, ge=1)
    """Sessions that may be starting at once."""
    max_session_life_s: float = Field(7_200.0, gt=0)
    """Longest life of a session, renewals included."""
    default_ttl_s: float = Field(600.0, gt=0)
    """Life of a session whose opener wishes none."""
    max_running: int = Field(0, ge=0)
    """Tool calls and scores that run at once, further ones wait; 0 = 1,024, for python one a processor."""
    unsafe: bool = False
    """Run python code without a sandbox where bubblewrap does not work. Only for code that you trust."""
    work_dir: str = ""
    """Folder under which python sessions keep their files; default: a temporary one."""
    sandbox: SandboxSection = SandboxSection.model_validate({})
    metrics_listen: str = ""
    """host:port of /metrics; empty serves none."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    def running(self) -> int:
        """max_running, or its default."""
        return self.max_running or (1_024 if self.environment == "calculator" else os.cpu_count() or 1)

    @model_validator(mode="after")
    def _life(self) -> "ToolEnvConfig":
        if self.default_ttl_s > self.max_session_life_s:
            raise ValueError(
                f"default_ttl_s {self.default_ttl_s:g} is longer than max_session_life_s {self.max_session_life_s:g}"
            )
        return self
