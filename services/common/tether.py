"""Runs a command that dies with its parent: `python -I -S tether.py PARENT_PID COMMAND...`.

A process of its own because the parent-death signal must be set between fork and exec, and running Python code there
is unsafe in a process with threads. Imports nothing of the project. Where the system has no such signal (not Linux),
the command simply runs.
"""

import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> None:
    """Sets the signal, makes sure that the parent still lives, becomes the command."""
    parent, command = int(argv[1]), argv[2:]
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before the signal was set
            sys.exit(1)
    os.execvp(command[0], command)  # noqa: S606 - a list, no shell


if __name__ == "__main__":
    main(sys.argv)
