"""The session table: names, epochs, stored calls and scores, expiry. Pure: the clock and new names are parameters.

It decides what the contract (toolenv_service.proto) leaves no choice about; running tools is api.py's work.

    session   open -> ended (closed or expired); an ended one is remembered for a while, so that a late OpenSession
              with its request id is refused instead of starting a second sandbox for the same attempt
    call      begun -> done, once; the same id again gives the same call
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from services.common import errors
from services.common.errors import LibraError

MAX_CALLS = 1024
"""Calls of one session. More are refused: forgetting an old result would allow its call to run twice."""

MAX_ENDED = 65_536
"""Ended sessions that are remembered."""

MAX_NAME_BYTES = 128
RETRY_AFTER_S = 1.0

Result = TypeVar("Result")
Score = TypeVar("Score")


@dataclass(slots=True)
class Call(Generic[Result]):
    """One call: what was asked, and the result once it is done."""

    call_id: str
    digest: bytes
    result: Result | None = None


@dataclass(slots=True)
class Session(Generic[Result, Score]):
    """One open session. Times are seconds of the monotonic clock."""

    name: str
    request_id: str
    digest: bytes
    epoch: int
    expires: float
    dies: float
    """No renewal goes beyond this."""
    calls: dict[str, Call[Result]] = field(default_factory=dict)
    score: Score | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """What is remembered of a session that is over."""

    request_id: str
    epoch: int
    how: str
    """closed or expired"""
    forget: float


class Sessions(Generic[Result, Score]):
    """All sessions of one server. Every method raises LibraError for what the contract refuses."""

    def __init__(
        self,
        max_sessions: int,
        max_life_s: float,
        default_ttl_s: float,
        *,
        now: Callable[[], float],
        new_name: Callable[[], str],
    ) -> None:
        self._max_sessions = max_sessions
        self._max_life = max_life_s
        self._default_ttl = default_ttl_s
        self._now = now
        self._new_name = new_name
        self._open: dict[str, Session[Result, Score]] = {}
        self._by_request: dict[str, str] = {}
        self._ended: dict[str, Ended] = {}

    def __len__(self) -> int:
        return len(self._open)

    def open(self, request_id: str, content: bytes, epoch: int, ttl_s: float) -> tuple[Session[Result, Score], bool]:
        """The session of this request id, and whether it is new.

        A repeated request changes nothing, the epoch included: only AttachSession does.
        """
        now = self._now()
        self._forget(now)
        digest = hashlib.sha256(content).digest()
        name = self._by_request.get(request_id)
        if name is not None:
            session = self.find(name)
            if session.digest != digest:
                raise LibraError(
                    "REQUEST_ID_REUSED",
                    f"request id {request_id} opened {name} with another task or seed; use a new id for other content",
                    resource=name,
                )
            return session, False
        if len(self._open) >= self._max_sessions:
            raise LibraError(
                "CAPACITY",
                f"all {self._max_sessions} sessions of this server are in use; try again, or raise max_sessions",
                retry_after_s=str(RETRY_AFTER_S),
            )
        name = self._new_name()
        assert name not in self._open
        assert name not in self._ended
        dies = now + self._max_life
        session = Session(name, request_id, digest, epoch, min(now + self._wish(ttl_s), dies), dies)
        self._open[name] = session
        self._by_request[request_id] = name
        return session, True

    def abandon(self, session: Session[Result, Score]) -> None:
        """Undoes an `open` whose sandbox did not start: the request may be tried again."""
        self._open.pop(session.name, None)
        self._by_request.pop(session.request_id, None)

    def find(self, name: str) -> Session[Result, Score]:
        """NOT_FOUND if it never was or was closed, SESSION_EXPIRED if its time ran out."""
        session = self._open.get(name)
        if session is None:
            raise self._gone(name)
        if session.expires <= self._now():
            raise self._expired(name)
        return session

    def left(self, session: Session[Result, Score]) -> float:
        """Seconds until it expires."""
        return max(0.0, session.expires - self._now())

    def attach(self, name: str, epoch: int) -> Session[Result, Score]:
        """Raises the stored epoch; a lower one is STALE_FENCE."""
        session = self.find(name)
        self._not_below(session, epoch)
        session.epoch = epoch
        return session

    def user(self, name: str, epoch: int) -> Session[Result, Score]:
        """The session, for whoever is attached: the epoch must be the stored one."""
        session = self.find(name)
        self._not_below(session, epoch)
        if epoch != session.epoch:
            raise errors.stale_fence(
                f"{name} is attached with epoch {session.epoch}, not {epoch}; attach first",
                resource=name, expected=str(session.epoch), actual=str(epoch),
            )  # fmt: skip
        return session

    def begin(self, name: str, epoch: int, call_id: str, content: bytes) -> tuple[Call[Result], bool]:
        """The call of this id, and whether it is new and must be run. Other content under a known id is refused."""
        session = self.user(name, epoch)
        digest = hashlib.sha256(content).digest()
        call = session.calls.get(call_id)
        if call is not None:
            if call.digest != digest:
                raise errors.invalid_field(
                    f"call_id {call_id!r} of {name} was used for another tool or other arguments; use a new id",
                    resource=name, field="call_id",
                )  # fmt: skip
            return call, False
        if len(session.calls) >= MAX_CALLS:
            raise LibraError("CAPACITY", f"{name} has made {MAX_CALLS} calls, which is the limit", resource=name)
        call = session.calls[call_id] = Call(call_id, digest)
        return call, True

    def call(self, name: str, call_id: str) -> Call[Result]:
        """A call that has begun; NOT_FOUND proves that it never did."""
        call = self.find(name).calls.get(call_id)
        if call is None:
            raise LibraError("NOT_FOUND", f"{name} has no call {call_id!r}: it never started", resource=name)
        return call

    def renew(self, name: str, epoch: int, ttl_s: float) -> Session[Result, Score]:
        """Moves the expiry to now + ttl, never beyond the session's longest life; never to an earlier time."""
        session = self.find(name)
        self._not_below(session, epoch)
        session.expires = max(session.expires, min(self._now() + self._wish(ttl_s), session.dies))
        return session

    def close(self, name: str, epoch: int) -> Session[Result, Score] | None:
        """Ends it; None if there was nothing to end, which is no error."""
        if name not in self._open:
            ended = self._ended.get(name)
            if ended is not None and epoch < ended.epoch:
                raise errors.stale_fence(f"{name} ended with epoch {ended.epoch}; {epoch} is older", resource=name)
            return None
        session = self._open[name]
        self._not_below(session, epoch)
        self._end(session, "closed")
        return session

    def expire(self) -> list[Session[Result, Score]]:
        """Ends and returns those whose time is over."""
        now = self._now()
        over = [session for session in self._open.values() if session.expires <= now]
        for session in over:
            self._end(session, "expired")
        self._forget(now)
        return over

    def all(self) -> list[Session[Result, Score]]:
        """The open ones."""
        return list(self._open.values())

    def _wish(self, ttl_s: float) -> float:
        return ttl_s if ttl_s > 0 else self._default_ttl

    def _not_below(self, session: Session[Result, Score], epoch: int) -> None:
        if epoch < session.epoch:
            raise errors.stale_fence(
                f"{session.name} has epoch {session.epoch}; {epoch} is older: another worker has taken it over, stop",
                resource=session.name, expected=str(session.epoch), actual=str(epoch),
            )  # fmt: skip

    def _end(self, session: Session[Result, Score], how: str) -> None:
        del self._open[session.name]
        self._ended[session.name] = Ended(session.request_id, session.epoch, how, self._now() + self._max_life)

    def _forget(self, now: float) -> None:
        # ended sessions stand in the order of their ends, which is that of their forget times
        while self._ended:
            name, ended = next(iter(self._ended.items()))
            if ended.forget > now and len(self._ended) <= MAX_ENDED:
                return
            del self._ended[name]
            del self._by_request[ended.request_id]

    def _gone(self, name: str) -> LibraError:
        ended = self._ended.get(name)
        if ended is None:
            return LibraError("NOT_FOUND", f"no session {name!r} on this server: it may have restarted", resource=name)
        if ended.how == "expired":
            return self._expired(name)
        return LibraError("NOT_FOUND", f"session {name} was closed", resource=name)

    def _expired(self, name: str) -> LibraError:
        message = f"session {name} expired and its sandbox is gone; renew sessions in time"
        return LibraError("SESSION_EXPIRED", message, resource=name)
