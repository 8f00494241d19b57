"""The rollout worker: `python -m services.rollout --config FILE`."""

import argparse
import asyncio
import sys

from services.common import config as configuration
from services.common import log
from services.common.errors import ConfigError
from services.rollout.config import RolloutConfig


def main() -> int:
    """Runs the worker; 2 if its configuration is wrong, 1 if a part of it failed."""
    parser = argparse.ArgumentParser(prog="python -m services.rollout", description=__doc__)
    parser.add_argument("--config", required=True, help="YAML file; keys are those of RolloutConfig")
    arguments = parser.parse_args()
    try:
        config = configuration.load(arguments.config, RolloutConfig)
        log.setup("rollout", config.worker, config.log_level)
        from services.rollout import bootstrap

        return asyncio.run(bootstrap.run(config))
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
