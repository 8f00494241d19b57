"""The worker processes of a node: started from templates, restarted when they crash, stopped and killed on demand."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

from services.common import errors, log
from services.common.processes import Launch, RestartPolicy, Supervised
from services.common.rpc.server import write_ready
from services.node.config import NodeConfig, WorkerTemplate

_log = log.get(__name__)


class Workers:
    """All worker processes; `on_change(worker)` is called after each change of state of one."""

    def __init__(self, config: NodeConfig, on_change: Callable[[Supervised], None]) -> None:
        self._config = config
        self._on_change = on_change
        restart = config.restart
        policy = RestartPolicy(restart.max_restarts, restart.window_s, restart.first_pause_s, restart.longest_pause_s)
        self.templates = {t.name: t for t in config.workers}
        self.by_name = {t.name: Supervised(self._launch(t), policy, self._changed) for t in config.workers}

    def _launch(self, template: WorkerTemplate) -> Launch:
        pids = self._config.pids
        return Launch(
            name=template.name,
            argv=template.argv,
            log=Path(template.log) if template.log else None,
            ready_file=Path(template.ready_file),
            pid_file=Path(pids) / f"{template.name}.pid" if pids else None,
            env=template.env,
            ready_timeout_s=self._config.ready_timeout_s,
        )

    def start_all(self) -> None:
        """Starts every worker whose template says so."""
        for template in self.templates.values():
            if template.start:
                self.by_name[template.name].start()

    def start(self, worker: str, template: str) -> None:
        """Starts one; NOT_FOUND if no template has that name, INVALID_FIELD if it is another worker's."""
        name = worker.removeprefix("workers/")
        if template and template not in self.by_name:
            raise errors.not_found(f"template {template}")
        if template and template != name:
            raise errors.invalid_field(f"template {template!r} is for worker {template!r}, not for {name!r}")
        self._get(name).start()

    async def stop(self, worker: str, grace_s: float) -> None:
        """Ends one and keeps it ended."""
        await self._get(worker.removeprefix("workers/")).stop(grace_s)

    def kill(self, worker: str) -> None:
        """SIGKILL to one; it is restarted like after a crash."""
        self._get(worker).kill()

    async def stop_all(self) -> None:
        """Ends all at once."""
        await asyncio.gather(*(w.stop(self._config.stop_grace_s) for w in self.by_name.values()))

    def _get(self, name: str) -> Supervised:
        worker = self.by_name.get(name)
        if worker is None:
            raise errors.not_found(f"workers/{name}")
        return worker

    def _changed(self, worker: Supervised) -> None:
        _log.info("worker", name=worker.name, state=worker.state, pid=worker.pid, restarts=worker.restarts)
        self.write_state()
        self._on_change(worker)

    def write_state(self) -> None:
        """The state file: {worker: {state, pid, restarts, exit_code, message}}."""
        if self._config.state_file:
            state = {
                w.name: {
                    "state": w.state, "pid": w.pid, "restarts": w.restarts, "exit_code": w.exit_code,
                    "message": w.message,
                }
                for w in self.by_name.values()
            }  # fmt: skip
            write_ready(self._config.state_file, json.dumps(state, indent=1))
