"""The python environment: a working folder that lasts for the session, and one tool that runs code in it.

Task: {"question": text, and "answer": text or number, or "test": python code, or both}. The final answer is compared
with `answer`; `test` runs in the session's folder, in a sandbox of its own, and passes if it ends without an exception
or an exit. With both, both must hold. A test that imports the model's code trusts it with its own process; what it
must not trust, it should start as another one.
"""

import asyncio
import itertools
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.toolenv.envs.base import (
    CallResult,
    Episode,
    InfraError,
    Kind,
    Outcome,
    ScoreResult,
    TaskError,
    TimeoutMeaning,
    ToolSpec,
)
from services.toolenv.envs.calculator import same_answer
from services.toolenv.sandbox import process
from services.toolenv.sandbox.base import Limits, Sandbox, Script
from services.toolenv.sandbox.process import End, Run

TOOL = "run_python"
MAX_CODE_BYTES = 128 << 10
CPU_LIMIT_CODES = (128 + 24, 128 + 9)
"""Exit codes of SIGXCPU and SIGKILL: a process that used up its processor time, or was shot by the kernel."""


class Python:
    """The environment; sessions live in folders under `root`."""

    name = "python"
    version = "1"

    def __init__(
        self, sandbox: Sandbox, limits: Limits, root: Path, *, timeout_s: float = 30.0, instructions: str = ""
    ) -> None:
        self._sandbox = sandbox
        self._limits = limits
        self._root = root
        self._instructions = instructions
        self._numbers = itertools.count(1)
        self.tools: tuple[ToolSpec, ...] = (
            ToolSpec(
                name=TOOL,
                description="Runs Python code in the working folder and gives what it prints. Files stay; variables "
                "do not. There is no network.",
                schema={
                    "type": "object",
                    "properties": {"code": {"type": "string"}},
                    "required": ["code"],
                    "additionalProperties": False,
                },
                kind=Kind.SESSION,
                timeout_s=timeout_s,
                timeout_meaning=TimeoutMeaning.EFFECT_UNKNOWN,
            ),
        )

    async def open(self, task: Mapping[str, Any], seed: int) -> Episode:
        del seed
        question, answer, test = parse_task(task)
        folder = self._root / f"session-{next(self._numbers)}"
        work = folder / "work"
        try:
            await asyncio.to_thread(work.mkdir, parents=True)
            # whoever the code runs as must reach the folder, and need not list what is beside it
            folder.chmod(0o711)
            self._sandbox.prepare(work)
        except OSError as error:
            raise InfraError(f"{folder}: cannot make the session's folder: {error.strerror}") from error
        return PythonEpisode(self, question, answer, test, folder)

    async def run(self, folder: Path, name: str, code: str, timeout_s: float, arguments: tuple[str, ...] = ()) -> Run:
        """Runs code in a session's folder; isolated if it is not the model's (it has arguments)."""
        path = folder / f"{name}.py"
        try:
            await asyncio.to_thread(path.write_text, code, "utf-8", "replace")
            script = Script(path, folder / "work", arguments, isolated=bool(arguments))
            run = await process.run(self._sandbox, script, self._limits, timeout_s)
        except OSError as error:
            raise InfraError(f"{path}: cannot start a sandbox: {error.strerror}") from error
        if run.end is End.BROKEN:
            raise InfraError(f"the sandbox failed: {run.output[:200].decode('utf-8', 'replace')}")
        return run

    @property
    def instructions(self) -> str:
        return self._instructions


class PythonEpisode:
    """One session's folder."""

    def __init__(self, environment: Python, question: str, answer: str | None, test: str | None, folder: Path) -> None:
        self.instructions = environment.instructions
        self.observation = question
        self._environment = environment
        self._answer = answer
        self._test = test
        self._folder = folder
        self._runs = itertools.count(1)

    async def call(self, call_id: str, tool: str, arguments: Mapping[str, Any], timeout_s: float) -> CallResult:
        del call_id
        assert tool == TOOL
        code = arguments.get("code")
        if set(arguments) != {"code"} or not isinstance(code, str):
            return CallResult(Outcome.TOOL_ERROR, 'error: expected {"code": text}', "bad_arguments")
        if len(code.encode("utf-8", "replace")) > MAX_CODE_BYTES:
            return CallResult(Outcome.TOOL_ERROR, f"error: code is longer than {MAX_CODE_BYTES} bytes", "bad_arguments")
        return call_result(await self._environment.run(self._folder, f"call-{next(self._runs)}", code, timeout_s))

    async def score(self, final_answer: str, timeout_s: float) -> ScoreResult:
        components: dict[str, float] = {}
        if self._answer is not None:
            components["answer"] = float(same_answer(final_answer, self._answer))
        if self._test is not None:
            components["test"] = float(await self._passes(self._test, timeout_s))
        return ScoreResult(Outcome.OK, min(components.values()), components)

    async def close(self) -> None:
        await asyncio.to_thread(remove, self._folder)

    async def _passes(self, test: str, timeout_s: float) -> bool:
        """The nonce comes last, and only if the test ran to its end: an exit hidden in the model's code is no pass."""
        nonce = secrets.token_hex(16)
        code = f"import sys\n_nonce = sys.argv.pop(1)\n\ndef _test():\n    exec({test!r}, {{'__name__': 'test'}})\n\n"
        code += "_test()\nprint('\\n' + _nonce)\n"
        run = await self._environment.run(self._folder, "test", code, timeout_s, (nonce,))
        return run.end is End.EXIT and run.exit_code == 0 and run.output.rstrip().endswith(nonce.encode())


def call_result(run: Run) -> CallResult:
    """What the model is told of a run."""
    text = run.output.decode("utf-8", "replace")
    if run.end is End.TIMEOUT or (run.end is End.EXIT and run.exit_code == CPU_LIMIT_CODES[0]):
        return CallResult(Outcome.TIMEOUT, _joined(text, "timeout"), "timeout", run.truncated)
    if run.end is not End.EXIT:
        return CallResult(Outcome.TOOL_ERROR, _joined(text, f"killed: {run.end.value}"), "killed", run.truncated)
    if run.exit_code == 0:
        return CallResult(Outcome.OK, text, "output" if text else "empty", run.truncated)
    if run.exit_code in CPU_LIMIT_CODES:
        return CallResult(Outcome.TOOL_ERROR, _joined(text, "killed"), "killed", run.truncated)
    kind = "traceback" if "Traceback (most recent call last)" in text else "exit"
    return CallResult(Outcome.TOOL_ERROR, _joined(text, f"exit code {run.exit_code}"), kind, run.truncated)


def parse_task(task: Mapping[str, Any]) -> tuple[str, str | None, str | None]:
    """(question, answer, test); TaskError names the key that is wrong."""
    question, answer, test = task.get("question"), task.get("answer"), task.get("test")
    if not isinstance(question, str) or not question:
        raise TaskError("question: expected a text")
    if answer is not None and (isinstance(answer, bool) or not isinstance(answer, str | int | float)):
        raise TaskError("answer: expected a text or a number")
    if test is not None and not isinstance(test, str):
        raise TaskError("test: expected python code as a text")
    if answer is None and test is None:
        raise TaskError("neither answer nor test is given, so that nothing could be scored")
    return question, None if answer is None else str(answer), test


def remove(folder: Path) -> None:
    """Deletes a session's folder, whatever the code did to its permissions."""
    for path, folders, _ in os.walk(folder):
        for name in folders:
            inner = Path(path, name)
            if not inner.is_symlink():
                inner.chmod(0o700)
    shutil.rmtree(folder)


def _joined(text: str, line: str) -> str:
    return f"{text.rstrip()}\n{line}" if text.strip() else line
