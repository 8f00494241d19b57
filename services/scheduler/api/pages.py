"""Page tokens: where to go on, bound to the query that they came from."""

import base64
import hashlib
import json
from dataclasses import dataclass

from services.common import errors

MAX_PAGE = 1_000
DEFAULT_PAGE = 100


@dataclass(frozen=True, slots=True)
class Token:
    """Decoded: the first page's revision and the last name seen."""

    revision: int = 0
    after: str = ""


def size(wanted: int, default: int = DEFAULT_PAGE) -> int:
    """The page size; INVALID_FIELD outside 1 to 1,000 (0 is the default)."""
    if not 0 <= wanted <= MAX_PAGE:
        raise errors.invalid_field(f"page_size: {wanted}; expected 1 to {MAX_PAGE}")
    return wanted or default


def encode(revision: int, after: str, query: object) -> str:
    """A token for the page after `after`."""
    return base64.urlsafe_b64encode(json.dumps([revision, after, _sign(query)]).encode()).decode()


def decode(text: str, query: object) -> Token:
    """The token's content; BAD_PAGE_TOKEN if it is malformed or of another query. Empty text is the first page."""
    if not text:
        return Token()
    try:
        revision, after, sign = json.loads(base64.urlsafe_b64decode(text.encode()))
        revision, after = int(revision), str(after)
    except (ValueError, TypeError, RecursionError):
        raise errors.LibraError("BAD_PAGE_TOKEN", "the page token is malformed; start again without one") from None
    if sign != _sign(query):
        raise errors.LibraError("BAD_PAGE_TOKEN", "the page token belongs to another query; start again without one")
    return Token(revision, after)


def _sign(query: object) -> str:
    return hashlib.sha256(repr(query).encode()).hexdigest()[:16]
