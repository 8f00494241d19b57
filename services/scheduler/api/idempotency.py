"""Same request id, same answer; other content under the same id is refused. In the transaction of the mutation."""

import hashlib
from collections.abc import Callable
from typing import TypeVar

from services.common import errors, wire
from services.scheduler.api import convert
from services.scheduler.control.ledger import Change, Ledger
from services.scheduler.core.model import Answer
from services.scheduler.store.store import Store

R = TypeVar("R", bound=wire.Message)


class Idempotency:
    """Finds and keeps the answers of mutations."""

    def __init__(self, ledger: Ledger, store: Store) -> None:
        self._ledger = ledger
        self._store = store

    async def run(
        self,
        method: str,
        request: wire.Message,
        answer_type: Callable[[], R],
        mutate: Callable[[Change], R],
        caused_by: str,
    ) -> R:
        """Runs `mutate` in one change unless this request id was answered before; returns after the commit."""
        known = await self.known(method, request, answer_type)
        if known is not None:
            return known
        rid: str = request.request_id  # type: ignore[attr-defined]
        change = self._ledger.change(caused_by, rid)
        with self._ledger.guard(change):
            answer = mutate(change)
            self.keep(change, method, request, answer)
        await self._ledger.commit(change)
        return answer

    async def known(self, method: str, request: wire.Message, answer_type: Callable[[], R]) -> R | None:
        """The stored answer of this request id, or None."""
        rid = convert.request_id(request.request_id)  # type: ignore[attr-defined]
        stored = self._ledger.recall(rid)
        if stored is None:
            stored = await self._store.answer(rid)
            # the same request may have been answered meanwhile: a call that was repeated too early
            stored = self._ledger.recall(rid) or stored
        if stored is None:
            return None
        if stored.method != method or stored.content_sha256 != _sha(request):
            raise errors.LibraError(
                "REQUEST_ID_REUSED",
                f"request_id {rid} was used before with other content; draw a new one for each mutation",
            )
        await self._ledger.barrier()
        answer = answer_type()
        answer.ParseFromString(stored.answer)
        return answer

    def keep(self, change: Change, method: str, request: wire.Message, answer: wire.Message) -> None:
        """Stores the answer with the change."""
        rid = convert.request_id(request.request_id)  # type: ignore[attr-defined]
        row = Answer(rid, method, _sha(request), answer.SerializeToString(), change.now)
        change.unit.answer(row)
        self._ledger.remember(row)


def _sha(request: wire.Message) -> str:
    return hashlib.sha256(request.SerializeToString(deterministic=True)).hexdigest()
