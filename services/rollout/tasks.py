"""The content of a task: given as text, as a blob, or as a line of the run's task file."""

import json

from services.common import errors, wire
from services.common.blobs import BlobStore

MAX_TASK_BYTES = 256 << 10
MAX_FILES = 4
"""Task files kept in memory."""


class TaskReader:
    """Reads tasks; keeps the lines of the last few task files."""

    def __init__(self, blobs: BlobStore) -> None:
        self._blobs = blobs
        self._files: dict[str, list[str]] = {}

    def read(self, task: wire.Task, run: wire.Run) -> str:
        """The task as JSON text. INVALID_FIELD if it is not an object, or the file has no such line."""
        which = task.WhichOneof("content")
        if which == "json":
            text = task.json
        elif which == "blob":
            text = self._blobs.get(task.blob).decode()
        elif which == "line":
            lines = self._lines(run.tasks.file)
            if not 0 <= task.line < len(lines):
                raise errors.invalid_field(f"line {task.line} of a task file with {len(lines)} lines")
            text = lines[task.line]
        else:
            raise errors.invalid_field("the task has no content; expected json, blob or line")
        if len(text.encode()) > MAX_TASK_BYTES:
            raise errors.invalid_field(f"the task has {len(text.encode())} bytes; at most {MAX_TASK_BYTES}")
        try:
            value = json.loads(text)
        except json.JSONDecodeError as error:
            raise errors.invalid_field(f"the task is not valid JSON: {error}") from None
        if not isinstance(value, dict):
            raise errors.invalid_field(f"the task is a JSON {type(value).__name__}; expected an object")
        return text

    def _lines(self, file: wire.BlobRef) -> list[str]:
        if file.sha256 not in self._files:
            while len(self._files) >= MAX_FILES:
                self._files.pop(next(iter(self._files)))
            self._files[file.sha256] = self._blobs.get(file).decode().splitlines()
        return self._files[file.sha256]
