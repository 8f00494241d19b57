"""The lighthouse of a test, in its process: one of its own would have to import torch first."""

import threading
import time

from services.trainer import lighthouse
from services.trainer.config import LighthouseConfig


class Lighthouse:
    """Runs `services.trainer.lighthouse` in a thread."""

    def __init__(self, folder, **settings):
        self._ready = folder / "lighthouse"
        self._settings = LighthouseConfig(ready_file=str(self._ready), **settings)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lighthouse.serve, args=(self._settings, self._stop), daemon=True)

    def start(self):
        """Returns its address."""
        self._thread.start()
        deadline = time.monotonic() + 30
        while not self._ready.exists():
            assert self._thread.is_alive()
            assert time.monotonic() < deadline
            time.sleep(0.005)
        return self._ready.read_text()

    def stop(self):
        self._stop.set()
        if self._thread.ident:
            self._thread.join(timeout=10)
