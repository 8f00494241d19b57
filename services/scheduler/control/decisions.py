"""The last decisions about each resource, in memory: what Explain adds to the recorded events."""

from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass

MAX_NAMES = 4_096
MAX_EACH = 16


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision; `about` names another resource that it concerns."""

    time: float
    code: str
    text: str
    numbers: Mapping[str, float]
    about: str = ""


class Decisions:
    """Bounded by names (least recently decided go first) and by decisions of each."""

    def __init__(self) -> None:
        self._by_name: OrderedDict[str, deque[Decision]] = OrderedDict()

    def add(self, name: str, decision: Decision) -> None:
        """Keeps a decision; one equal to the last but for its time and numbers only renews it."""
        rows = self._by_name.setdefault(name, deque(maxlen=MAX_EACH))
        if rows and (rows[-1].code, rows[-1].text) == (decision.code, decision.text):
            rows.pop()
        rows.append(decision)
        self._by_name.move_to_end(name)
        while len(self._by_name) > MAX_NAMES:
            self._by_name.popitem(last=False)

    def of(self, name: str) -> tuple[Decision, ...]:
        """Decisions about a resource, oldest first."""
        return tuple(self._by_name.get(name, ()))
