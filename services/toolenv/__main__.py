"""A tool environment server: `python -m services.toolenv --config FILE`."""

import argparse
import asyncio
import sys

from services.common import config as configuration
from services.common import log
from services.common.errors import ConfigError
from services.toolenv.config import ToolEnvConfig


def main() -> int:
    """Serves until told to stop; 2 if the configuration is wrong or the environment cannot be offered here."""
    parser = argparse.ArgumentParser(prog="python -m services.toolenv", description=__doc__)
    parser.add_argument("--config", required=True, help="YAML file; keys are those of ToolEnvConfig")
    arguments = parser.parse_args()
    try:
        config = configuration.load(arguments.config, ToolEnvConfig)
        log.setup("toolenv", config.environment, config.log_level)
        from services.toolenv import bootstrap

        return asyncio.run(bootstrap.run(config))
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
