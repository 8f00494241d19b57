"""Named places where a test can make the process die, wait or fail; nothing unless LIBRA_FAILPOINTS is set.

LIBRA_FAILPOINTS="trainer.after_commit=kill;store.fsync=sleep:0.005;engine.step=error". A count limits how often:
"trainer.after_commit=kill*1" acts at the first hit only.
"""

import os
import signal
import time


def _parse(text: str) -> dict[str, list[object]]:
    points: dict[str, list[object]] = {}
    for part in filter(None, text.split(";")):
        name, _, action = part.partition("=")
        action, _, times = action.partition("*")
        points[name] = [action, int(times) if times else -1]
    return points


_POINTS = _parse(os.environ.get("LIBRA_FAILPOINTS", ""))


class FailpointError(RuntimeError):
    """Raised where the environment asked for `error`."""


def hit(name: str) -> None:
    """Acts as told for this name: kill (SIGKILL to itself), sleep:SECONDS, error; otherwise nothing."""
    point = _POINTS.get(name)
    if point is None or point[1] == 0:
        return
    point[1] = int(str(point[1])) - 1
    action = str(point[0])
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action.startswith("sleep:"):
        time.sleep(float(action.removeprefix("sleep:")))
    elif action == "error":
        raise FailpointError(f"failpoint {name}")
    else:
        raise ValueError(f"LIBRA_FAILPOINTS: unknown action {action!r} for {name!r}; use kill, sleep:SECONDS or error")
