"""`python -m services.scheduler --config FILE`: the standalone scheduler service."""

import argparse
import asyncio
import sys

from services.common import config, log
from services.common.errors import ConfigError
from services.scheduler import rates
from services.scheduler.bootstrap import run
from services.scheduler.config import SchedulerConfig


def main() -> int:
    """Exit code 0 after a stop, 1 if the store failed, 2 for a wrong configuration."""
    parser = argparse.ArgumentParser(prog="python -m services.scheduler", description=__doc__)
    parser.add_argument("--config", required=True, help="YAML file; unknown keys are refused")
    arguments = parser.parse_args()
    try:
        settings = rates.beside(config.load(arguments.config, SchedulerConfig), arguments.config)
        log.setup("scheduler", level=settings.log_level)
        return asyncio.run(run(settings))
    except ConfigError as error:
        print(f"scheduler: {error}", file=sys.stderr)  # noqa: T201 - the exit text for people
        return 2


if __name__ == "__main__":
    sys.exit(main())
