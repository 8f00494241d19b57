"""`python -m services.node --config FILE`."""

import argparse
import asyncio
import sys

from services.common import config, log
from services.common.errors import ConfigError
from services.node import bootstrap
from services.node.config import NodeConfig


def main() -> int:
    """Runs the agent; 2 if the configuration is wrong."""
    parser = argparse.ArgumentParser(prog="python -m services.node", description="Libra's node agent")
    parser.add_argument("--config", required=True, help="YAML file; see services/node/config.py")
    arguments = parser.parse_args()
    try:
        settings = config.load(arguments.config, NodeConfig)
    except ConfigError as error:
        print(error, file=sys.stderr)  # noqa: T201 - the command's answer
        return 2
    log.setup("node", settings.node, settings.log_level)
    try:
        return asyncio.run(bootstrap.run(settings))
    except ConfigError as error:
        print(error, file=sys.stderr)  # noqa: T201 - as above
        return 2


if __name__ == "__main__":
    sys.exit(main())
