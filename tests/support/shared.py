"""Public tables and recorded episodes. They are no part of the repository: tests that need them skip without."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = Path(os.environ.get("LIBRA_SHARED", ROOT.parent / "shared"))
TRACES = FOLDER / "traces"
needs_traces = pytest.mark.skipif(
    not TRACES.is_dir(), reason=f"no recorded episodes at {TRACES}: set LIBRA_SHARED to the folder that has traces/"
)


def calibration(name: str) -> Path:
    """A calibration table; skips the test, saying what is missing."""
    path = FOLDER / "calibration" / name
    if not path.exists():
        pytest.skip(f"{path} is not there: set LIBRA_SHARED to the folder that has calibration/{name}")
    return path
