"""The `libra` command line; `python -m services.ops` is the same."""

import sys
from collections.abc import Sequence

import typer

from services.common import log
from services.common.errors import ConfigError, LibraError
from services.ops import render
from services.ops.cluster import ClusterFailed
from services.ops.commands import bench, changes, processes, reads, replay, runs, simulation

INTERRUPTED = 130
CONFIG = 2
FAILED = 1

app = typer.Typer(
    name="libra",
    help="Resource manager for agentic-RL post-training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(processes.demo)
app.command()(processes.up)
app.command()(processes.node)
app.command()(runs.run)
app.command()(runs.validate)
app.command()(reads.status)
app.command()(reads.events)
app.add_typer(reads.trajectories, name="trajectories")
app.command()(reads.explain)
app.command()(processes.check)
app.add_typer(bench.app, name="bench")
app.command()(changes.plan)
app.command()(changes.reassign)
app.command()(changes.preempt)
app.command()(simulation.simulate)
app.command()(simulation.calibrate)
app.command()(simulation.rates)
app.command()(replay.replay)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. Exit codes: 0 done, 1 failed, 2 wrong input (nothing was started), 130 interrupted."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    log.setup("libra", level="warning")
    try:
        app(given, prog_name="libra")
    except SystemExit as error:  # how typer ends: after --help, a usage error (2), or typer.Exit
        return error.code if isinstance(error.code, int) else 0
    except ConfigError as error:
        return _fail(given, "CONFIG", str(error), CONFIG)
    except LibraError as error:
        return _fail(given, error.reason, error.message, FAILED)
    except ClusterFailed as error:
        return _fail(given, "CLUSTER_FAILED", str(error), FAILED)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has had enough
        sys.stderr.close()
        return 0
    return 0


def _fail(arguments: Sequence[str], reason: str, message: str, code: int) -> int:
    """The one clear message; also as JSON when that was asked for."""
    if "--json" in arguments:
        render.line({"error": {"reason": reason, "message": message}})
    print(f"libra: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
