"""P12: a sandbox sees no host file, network, other sandbox or credential, and stays in its limits."""

import asyncio
import dataclasses
import http.server
import os
import socket
import threading
import time
from pathlib import Path

import pytest

from services.toolenv.envs.base import InfraError, Outcome, TaskError
from services.toolenv.envs.python import TOOL, Python, remove
from services.toolenv.sandbox import process
from services.toolenv.sandbox.base import Limits, Script, children
from services.toolenv.sandbox.bubblewrap import Bubblewrap, usable

UNUSABLE = asyncio.run(usable())
pytestmark = pytest.mark.skipif(UNUSABLE is not None, reason=f"no sandbox here: {UNUSABLE}")

MIB = 1 << 20
LIMITS = Limits(memory_bytes=192 * MIB, cpu_s=5, processes=16, output_bytes=4096, disk_bytes=4 * MIB, files=200)
SECONDS = 20.0
"""Limit of calls that should end by themselves; far more than they need."""

TASK = {"question": "What is 2+2?", "answer": "4"}


@pytest.fixture
def root(tmp_path):
    """Sandboxes may run as another user, who must reach it; pytest's own folders are closed."""
    for folder in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        folder.chmod(0o711)
    return tmp_path


@pytest.fixture
def environment(root):
    return Python(Bubblewrap(), LIMITS, root)


@pytest.fixture
async def episode(environment):
    opened = await environment.open(TASK, 1)
    yield opened
    await opened.close()


async def call(episode, code, timeout=SECONDS):
    return await episode.call("1-0", TOOL, {"code": code}, timeout)


async def test_code_runs_and_files_stay(episode):
    result = await call(episode, "open('note', 'w').write('4')\nprint(2 + 2)")
    assert (result.outcome, result.output, result.payload_class) == (Outcome.OK, "4\n", "output")
    assert (await call(episode, "print(open('note').read())")).output == "4\n"
    assert (await call(episode, "import note4")).payload_class == "traceback"
    assert (await call(episode, "open('note4.py', 'w').write('x = 1')")).payload_class == "empty"
    assert (await call(episode, "import note4; print(note4.x)")).output == "1\n"


async def test_an_exception_is_the_models_error_with_its_line(episode):
    result = await call(episode, "x = 1\nx / 0")
    assert (result.outcome, result.payload_class) == (Outcome.TOOL_ERROR, "traceback")
    assert "line 2" in result.output
    assert "ZeroDivisionError" in result.output
    result = await call(episode, "import sys; sys.exit(3)")
    assert (result.outcome, result.payload_class, result.output) == (Outcome.TOOL_ERROR, "exit", "exit code 3")


@pytest.mark.parametrize("path", ["/etc/shadow", "/etc/passwd", "/root/.ssh", "/home", "/var", __file__])
async def test_no_host_file_can_be_read(episode, path):
    code = f"import os\nprint(os.listdir({path!r}) if os.path.isdir({path!r}) else open({path!r}).read())"
    result = await call(episode, code)
    assert result.outcome is Outcome.TOOL_ERROR
    assert "No such file" in result.output


async def test_only_the_folder_and_tmp_can_be_written(episode):
    code = """
import os
for path in ["/x", "/usr/x", "/etc/x", "/dev/x", "/proc/sys/kernel/hostname", "/run.py", "/bin/x"]:
    try:
        open(path, "w").write("x")
        print("wrote", path)
    except OSError:
        pass
for path in ["/work/x", "/tmp/x"]:
    open(path, "w").write("x")
"""
    result = await call(episode, code)
    assert (result.outcome, result.output) == (Outcome.OK, "")


async def test_nothing_of_the_service_is_inherited(episode, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "hush")
    code = """
import os
print(sorted(os.environ), os.listdir("/proc/self/fd"), os.getuid())
print([open(f"/proc/{p}/environ").read() for p in os.listdir("/proc") if p.isdigit()])
"""
    result = await call(episode, code)
    assert "PATH" in result.output
    assert "SECRET" not in result.output
    assert "'3'" in result.output, "the listing's own descriptor"
    assert "'4'" not in result.output, "no descriptor came along"
    assert "] 65534\n" in result.output
    assert os.environ["PATH"] not in result.output


async def test_the_host_cannot_be_reached_over_the_network(episode):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        port = server.server_address[1]
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            pass
        connect = "import socket; socket.create_connection(({!r}, {}), timeout=3); print('con' + 'nected')"
        for host in ("127.0.0.1", socket.gethostbyname(socket.gethostname()), "192.0.2.1"):
            result = await call(episode, connect.format(host, port))
            assert "connected" not in result.output
            assert result.outcome is Outcome.TOOL_ERROR
    finally:
        server.shutdown()
        server.server_close()


async def test_no_other_process_can_be_seen_or_signalled(episode):
    code = f"import os; print(sorted(int(p) for p in os.listdir('/proc') if p.isdigit())); os.kill({os.getpid()}, 9)"
    result = await call(episode, code)
    assert "ProcessLookupError" in result.output
    assert max(int(p) for p in result.output.splitlines()[0].strip("[]").split(",")) < 10


async def test_no_further_namespaces_and_no_mounts(episode):
    code = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
print(libc.unshare(0x10000000), libc.unshare(0x00020000), libc.mount(b"none", b"/tmp", b"tmpfs", 0, None))
print([line for line in open("/proc/self/status") if line.startswith(("CapEff", "NoNewPrivs"))])
"""
    result = await call(episode, code)
    assert result.output.startswith("-1 -1 -1\n"), result.output
    assert "CapEff:\\t0000000000000000" in result.output
    assert "NoNewPrivs:\\t1" in result.output


async def test_sessions_do_not_see_each_other(environment, episode):
    other = await environment.open(TASK, 1)
    await call(other, "open('secret', 'w').write('x'); open('/tmp/secret', 'w').write('x')")
    result = await call(
        episode, "import os; print(os.listdir('/work'), os.listdir('/tmp'), os.path.exists('/work/../secret'))"
    )
    assert result.output == "[] [] False\n"
    await other.close()


async def test_links_out_of_the_folder_lead_nowhere(episode):
    code = "import os; os.symlink('/etc/shadow', 'a'); os.symlink('/', 'b')\n"
    code += "print(os.path.exists('a'), os.path.exists('b/etc'))"
    assert (await call(episode, code)).output == "False False\n"
    # the host counts and deletes without following them
    assert (await call(episode, "print(1)")).output == "1\n"


async def test_an_endless_loop_ends_at_the_wall(episode):
    began = time.monotonic()
    result = await call(episode, "print('so far', flush=True)\nwhile True: pass", timeout=1.0)
    assert (result.outcome, result.payload_class) == (Outcome.TIMEOUT, "timeout")
    assert result.output == "so far\ntimeout"
    assert time.monotonic() - began < 1.0 + process.WAIT_FOR_KILL_SECONDS + process.REAP_SECONDS


async def test_ignored_signals_and_sessions_of_its_own_do_not_save_it(episode):
    code = """
import os, signal, time
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
for _ in range(4):
    if os.fork() == 0:
        os.setsid()
        os.fork()
        break
while True: time.sleep(1)
"""
    before = sandboxed()
    result = await call(episode, code, timeout=1.5)
    assert result.outcome is Outcome.TIMEOUT
    assert sandboxed() <= before


async def test_what_it_leaves_running_dies_with_it(episode):
    code = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(600)\nprint('parent')"
    before = sandboxed()
    assert (await call(episode, code)).output == "parent\n"
    assert sandboxed() <= before


def sandboxed():
    """Processes on this machine whose command is our script's."""
    found = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if b"/run.py" in (folder / "cmdline").read_bytes():
                    found.add(folder.name)
            except OSError:
                continue
    return found


async def test_processor_time_is_bounded(root):
    environment = Python(Bubblewrap(), dataclasses.replace(LIMITS, cpu_s=1), root)
    episode = await environment.open(TASK, 1)
    result = await call(episode, "while True: pass", timeout=60)
    assert result.outcome is Outcome.TIMEOUT
    await episode.close()


async def test_a_fork_bomb_is_bounded(episode):
    code = """
import os, time
made = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        made += 1
except OSError:
    print(made, flush=True)
    os._exit(0)
"""
    result = await call(episode, code)
    assert 0 < int(result.output) < LIMITS.processes


async def test_a_memory_bomb_ends_in_one_process(episode):
    result = await call(episode, "x = bytearray(1 << 30)")
    assert result.outcome is Outcome.TOOL_ERROR
    assert "MemoryError" in result.output


async def test_a_memory_bomb_of_many_processes_is_killed(episode):
    code = f"""
import os, time
for _ in range(8):
    if os.fork() == 0:
        x = b"x" * {LIMITS.memory_bytes // 4}
        time.sleep(60)
time.sleep(60)
"""
    result = await call(episode, code)
    assert (result.outcome, result.output) == (Outcome.TOOL_ERROR, "killed: memory limit")


async def test_memory_file_systems_are_bounded(episode):
    for folder in ("/tmp", "/dev/shm"):
        code = f"[open('{folder}/' + str(i), 'wb').write(b'x' * {MIB}) for i in range(1000)]"
        result = await call(episode, code)
        assert "No space left" in result.output


async def test_long_output_is_cut_and_endless_output_killed(episode):
    result = await call(episode, f"print('x' * {LIMITS.output_bytes * 3}); open('done', 'w')")
    assert (result.outcome, result.truncated) == (Outcome.OK, True)
    assert result.output == "x" * LIMITS.output_bytes
    assert (await call(episode, "import os; print(os.listdir())")).output == "['done']\n", "it ran to its end"
    result = await call(episode, "while True: print('x' * 1000)")
    assert (result.outcome, result.truncated) == (Outcome.TOOL_ERROR, True)
    assert result.output.endswith("killed: output limit")
    assert len(result.output) < LIMITS.output_bytes + 100


async def test_output_is_any_bytes(episode):
    result = await call(
        episode, "import sys; sys.stdout.buffer.write(bytes(range(256))); print('\\udcff', file=sys.stderr)"
    )
    result.output.encode()
    assert "\ufffd" in result.output


async def test_disk_is_bounded_and_can_be_tidied_up(episode):
    for code in (
        "open('big', 'wb').write(b'x' * (64 << 20))",
        "[open(f'f{i}', 'wb').write(b'x' * (1 << 20)) for i in range(64)]",
        "[open(f'g{i}', 'w') for i in range(5000)]",
    ):
        result = await call(episode, code)
        assert result.outcome is Outcome.TOOL_ERROR, code
    tidy = "import os\nfor name in os.listdir():\n    os.remove(name)"
    assert (await call(episode, tidy)).outcome is Outcome.OK
    assert (await call(episode, "open('small', 'w').write('x')")).outcome is Outcome.OK


async def test_cancellation_kills(episode):
    before = sandboxed()
    running = asyncio.create_task(call(episode, "open('begun', 'w')\nwhile True: pass", timeout=60))
    begun = episode._folder / "work" / "begun"
    async with asyncio.timeout(30):
        while not begun.exists():
            await asyncio.sleep(0.02)
    assert sandboxed() > before
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert sandboxed() <= before


async def test_no_process_of_ours_is_left(episode):
    before = set(children(os.getpid()))  # of other tests' fixtures
    await call(episode, "while True: pass", timeout=0.5)
    await call(episode, "print(1)")
    assert set(children(os.getpid())) <= before


async def test_a_sandbox_that_does_not_start_is_nobodys_fault(root):
    environment = Python(Bubblewrap("/usr/bin/no-such-python"), LIMITS, root)
    episode = await environment.open(TASK, 1)
    # the interpreter is missing inside: prlimit says so and ends with 127, which python never does by itself
    result = await call(episode, "print(1)")
    assert result.outcome is not Outcome.OK
    await asyncio.to_thread(remove, episode._folder / "work")
    with pytest.raises(InfraError):
        await call(episode, "print(1)")


async def test_a_sandbox_that_fails_to_begin_is_infra(root):
    class Broken(Bubblewrap):
        def command(self, script, limits, status_fd):
            command = super().command(script, limits, status_fd)
            return [word.replace("/usr", "/not-there") if word == "/usr" else word for word in command]

    episode = await Python(Broken(), LIMITS, root).open(TASK, 1)
    with pytest.raises(InfraError, match="the sandbox failed"):
        await call(episode, "print(1)")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "expected"),
        ({"code": 3}, "expected"),
        ({"code": "1", "x": 1}, "expected"),
        ({"code": "#" * 200_000}, "longer"),
    ],
)
async def test_wrong_arguments_are_the_models_error(episode, arguments, said):
    result = await episode.call("1-0", TOOL, arguments, SECONDS)
    assert (result.outcome, result.payload_class) == (Outcome.TOOL_ERROR, "bad_arguments")
    assert said in result.output


async def test_code_that_is_no_text_on_disk_still_ends(episode):
    for code in ("print('\ud800')", "\x00", "x = (", ""):
        assert (await call(episode, code)).outcome in (Outcome.OK, Outcome.TOOL_ERROR)


@pytest.mark.parametrize(
    ("task", "said"),
    [({}, "question"), ({"question": "q"}, "neither"), ({"question": "q", "answer": []}, "answer"),
     ({"question": "q", "test": 3}, "test")],
)  # fmt: skip
async def test_wrong_tasks_are_refused(environment, task, said):
    with pytest.raises(TaskError, match=said):
        await environment.open(task, 1)


async def score(environment, task, code, answer=""):
    episode = await environment.open({"question": "q"} | task, 1)
    if code:
        await call(episode, code)
    result = await episode.score(answer, 5.0)
    await episode.close()
    assert result.outcome is Outcome.OK
    return result.reward


async def test_score(environment):
    assert await score(environment, {"answer": "4"}, "", "4.0") == 1.0
    assert await score(environment, {"answer": "4"}, "", "5") == 0.0
    test = {"test": "import solution\nassert solution.f(2) == 4"}
    right = "open('solution.py', 'w').write('def f(x): return x * 2')"
    assert await score(environment, test, right) == 1.0
    assert await score(environment, test, "open('solution.py', 'w').write('def f(x): return 5')") == 0.0
    assert await score(environment, test, "") == 0.0, "no solution is a failing test, not a broken grader"
    assert await score(environment, test | {"answer": "4"}, right, "5") == 0.0


async def test_a_test_cannot_be_passed_by_ending_it_or_by_replacing_modules(environment):
    test = {"test": "import solution\nassert solution.f(2) == 4"}
    assert await score(environment, test, "open('solution.py', 'w').write('import os; os._exit(0)')") == 0.0
    assert await score(environment, test, "open('solution.py', 'w').write('raise SystemExit(0)')") == 0.0
    shadow = "open('runpy.py', 'w').write('import os; os._exit(0)'); open('sys.py', 'w').write('')"
    assert await score(environment, test, shadow) == 0.0
    assert await score(environment, test, "open('solution.py', 'w').write('while True: pass')") == 0.0


async def test_a_folder_made_unreadable_is_removed_all_the_same(root):
    environment = Python(Bubblewrap(), LIMITS, root)
    episode = await environment.open(TASK, 1)
    await call(episode, "import os; os.makedirs('a/b'); open('a/b/c', 'w'); os.chmod('a/b', 0); os.chmod('a', 0)")
    await episode.close()
    assert list(root.iterdir()) == []


async def test_two_at_once_do_not_share_a_limit(environment):
    first, second = await environment.open(TASK, 1), await environment.open(TASK, 1)
    code = "import os, time\nfor _ in range(8):\n    if os.fork() == 0:\n        time.sleep(60)\nprint('made')"
    results = await asyncio.gather(call(first, code), call(second, code))
    assert [result.output for result in results] == ["made\n", "made\n"]


async def test_usage_counts_without_following_links(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 10_000)
    (tmp_path / "loop").symlink_to(tmp_path)
    found = process.usage(tmp_path, 100)
    assert found.entries == 2
    assert 10_000 <= found.size < 30_000
    assert process.usage(tmp_path, 0).entries == 1, "it stops counting"


async def test_scripts_are_run_where_they_are_said_to(root):
    work, path = root / "w", root / "s.py"
    await asyncio.to_thread(work.mkdir)
    await asyncio.to_thread(path.write_text, "import os; print(os.getcwd())")
    sandbox = Bubblewrap()
    sandbox.prepare(work)
    run = await process.run(sandbox, Script(path, work), LIMITS, SECONDS)
    assert (run.end, run.exit_code, run.output) == (process.End.EXIT, 0, b"/work\n")
