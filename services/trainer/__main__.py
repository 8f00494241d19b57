"""`python -m services.trainer --config FILE`: one trainer worker."""

import argparse
import asyncio
import sys

from services.common import config, log
from services.common.errors import ConfigError, LibraError
from services.trainer.config import Config


def main() -> int:
    """Exit code: 0 stopped, 1 failed, 2 bad configuration, 3 replaced by a newer session of this worker."""
    parser = argparse.ArgumentParser(prog="services.trainer", description="A Libra trainer worker.")
    parser.add_argument("--config", required=True, help="YAML file, see services/trainer/config.py")
    try:
        settings = config.load(parser.parse_args().config, Config)
        log.setup("trainer", settings.worker, settings.log_level)
        from services.trainer import bootstrap

        return asyncio.run(bootstrap.run(settings))
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except LibraError as error:
        # another try may succeed: 2 would tell the supervisor never to restart it
        sys.stderr.write(f"{error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
