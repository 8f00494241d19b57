"""`python -m services.trainer.lighthouse --config FILE`: torchft's lighthouse, which forms the quorums of trainers.

A process of its own, since it has an unauthenticated kill route: keep it on a network that only trainers reach.
"""

import argparse
import signal
import sys
import threading

from services.common import config, log
from services.common.errors import ConfigError
from services.common.rpc.server import write_ready
from services.trainer.config import LighthouseConfig

_log = log.get(__name__)


def serve(settings: LighthouseConfig, stop: threading.Event) -> None:
    """Runs until `stop` is set; writes http://host:port into the ready file. ConfigError if it cannot listen."""
    from torchft.coordination import LighthouseServer

    try:
        server = LighthouseServer(
            bind=settings.listen,
            min_replicas=settings.min_replicas,
            join_timeout_ms=settings.join_timeout_ms,
            quorum_tick_ms=settings.quorum_tick_ms,
            heartbeat_timeout_ms=settings.heartbeat_timeout_ms,
        )
    except (RuntimeError, OSError, ValueError) as error:
        raise ConfigError(f"cannot listen on {settings.listen}: {error}; configure another port") from None
    # the server names itself by the machine's host name, which need not resolve; the port is what matters
    host, port = settings.listen.rpartition(":")[0], server.address().rpartition(":")[2]
    if settings.ready_file:
        write_ready(settings.ready_file, f"http://{host}:{port}")
    stop.wait()
    server.shutdown()


def main() -> int:
    """Exit code: 0 stopped, 2 bad configuration."""
    parser = argparse.ArgumentParser(prog="services.trainer.lighthouse", description="The trainers' lighthouse.")
    parser.add_argument("--config", required=True, help="YAML file, see services/trainer/config.py")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        settings = config.load(parser.parse_args().config, LighthouseConfig)
        log.setup("lighthouse", level=settings.log_level)
        serve(settings, stop)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
