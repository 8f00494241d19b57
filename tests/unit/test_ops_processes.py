"""Supervision of real child processes."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from services.common.processes import (
    TETHER,
    Child,
    Launch,
    RestartPolicy,
    StartFailed,
    Supervised,
    describe_exit,
    is_alive,
    tail,
)

READY = "import pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text('here'); time.sleep(600)"


def launch(folder: Path, code: str, **fields: object) -> Launch:
    ready = folder / "ready"
    return Launch(
        name="child",
        argv=[sys.executable, "-c", code, str(ready)],
        log=folder / "child.log",
        ready_file=ready,
        **fields,
    )


async def until(condition) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_child_is_ready_when_its_file_appears_and_stops_politely(tmp_path: Path) -> None:
    child = Supervised(launch(tmp_path, READY, pid_file=tmp_path / "pid"))
    child.start()
    assert await child.wait_ready() == "here"
    assert int((tmp_path / "pid").read_text()) == child.pid
    pid = child.pid
    await child.stop(5.0)
    assert child.state == "STOPPED"
    assert child.child is not None
    assert child.child.alive is False
    assert not is_alive(pid)
    assert not (tmp_path / "pid").exists()


async def test_a_crash_is_followed_by_a_restart_and_a_stale_ready_file_is_not_believed(tmp_path: Path) -> None:
    states: list[str] = []
    child = Supervised(launch(tmp_path, READY), RestartPolicy(first_pause_s=0.01), lambda c: states.append(c.state))
    child.start()
    await child.wait_ready()
    first = child.pid
    child.kill()
    await until(lambda: child.state == "PAUSED" or child.restarts)
    await until(lambda: child.state == "READY")
    assert child.pid != first
    assert child.restarts == 1
    assert "SIGKILL" in child.message
    assert states == ["STARTING", "READY", "PAUSED", "STARTING", "READY"]
    await child.stop(0)


async def test_restarts_are_bounded_and_the_last_words_are_kept(tmp_path: Path) -> None:
    code = "import sys; print('boom: no such device', file=sys.stderr); sys.exit(1)"
    child = Supervised(launch(tmp_path, code), RestartPolicy(max_restarts=2, first_pause_s=0.01))
    child.start()
    with pytest.raises(StartFailed, match=r"ended with exit code 1: boom: no such device"):
        await child.wait_ready()
    assert child.state == "RETIRED"
    assert child.restarts == 2
    await child.stop(0)
    assert child.state == "RETIRED"


async def test_a_wrong_configuration_is_not_tried_again(tmp_path: Path) -> None:
    child = Supervised(launch(tmp_path, "import sys; print('f.yaml:3: unknown key'); sys.exit(2)"))
    child.start()
    with pytest.raises(StartFailed, match=r"f.yaml:3: unknown key") as failure:
        await child.wait_ready()
    assert failure.value.exit_code == 2
    assert child.restarts == 0


async def test_a_child_that_never_gets_ready_is_ended(tmp_path: Path) -> None:
    child = Supervised(
        launch(tmp_path, "import time; time.sleep(600)", ready_timeout_s=0.3), RestartPolicy(max_restarts=0)
    )
    child.start()
    with pytest.raises(StartFailed, match="SIGKILL"):
        await child.wait_ready()


async def test_stopping_kills_what_ignores_the_signal_and_what_it_started(tmp_path: Path) -> None:
    code = textwrap.dedent("""
        import pathlib, signal, subprocess, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        other = subprocess.Popen(["sleep", "600"])
        pathlib.Path(sys.argv[1]).write_text(str(other.pid))
        time.sleep(600)
    """)
    child = Supervised(launch(tmp_path, code))
    child.start()
    grandchild = int(await child.wait_ready())
    assert is_alive(grandchild)
    await child.stop(0.2)
    await until(lambda: not is_alive(grandchild))


async def test_stop_during_the_pause_and_start_again(tmp_path: Path) -> None:
    child = Supervised(launch(tmp_path, "import sys; sys.exit(1)"), RestartPolicy(first_pause_s=60, longest_pause_s=60))
    child.start()
    await until(lambda: child.state == "PAUSED")
    async with asyncio.timeout(5):
        await child.stop(5.0)
    assert child.state == "STOPPED"
    child.start()
    await until(lambda: child.state == "PAUSED")
    await child.stop(0)


def test_a_zombie_is_not_alive() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it has ended, nobody has reaped it
    assert Path(f"/proc/{process.pid}").exists()
    assert not is_alive(process.pid)
    process.wait()
    assert not is_alive(process.pid)


def test_nothing_survives_a_killed_parent(tmp_path: Path) -> None:
    code = textwrap.dedent(f"""
        import os, subprocess, sys, time
        child = subprocess.Popen([sys.executable, "-I", "-S", {str(TETHER)!r}, str(os.getpid()), "sleep", "600"],
                                 start_new_session=True)
        print(child.pid, flush=True)
        time.sleep(600)
    """)
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    pidfd = os.pidfd_open(child)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    import select

    assert select.select([pidfd], [], [], 10.0)[0], "the child outlived its parent"
    os.close(pidfd)
    parent.stdout.close()


async def test_a_child_with_a_dead_parent_does_not_start() -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-I", "-S", str(TETHER), "1", "sleep", "600")
    assert await asyncio.wait_for(process.wait(), 10) == 1


async def test_environment_and_output_reach_the_log(tmp_path: Path) -> None:
    code = "import os; print(os.environ['LIBRA_TEST'])"
    item = Launch("child", [sys.executable, "-c", code], tmp_path / "a" / "log", env={"LIBRA_TEST": "seen"})
    item.log.parent.mkdir()
    item.log.write_text("from an earlier life\n")
    child = await Child.start(item)
    assert await child.wait() == 0
    assert child.last_words() == "seen"
    assert item.log.read_text().startswith("from an earlier life")


def test_words_for_exits_and_tails(tmp_path: Path) -> None:
    assert describe_exit(3) == "ended with exit code 3"
    assert describe_exit(-9) == "was ended by SIGKILL"
    assert describe_exit(-200) == "was ended by signal 200"
    path = tmp_path / "log"
    assert tail(path) == ""
    path.write_text("".join(f"line {i}\n" for i in range(1_000)))
    assert tail(path).splitlines()[-1] == "line 999"
    assert len(tail(path).splitlines()) == 12
