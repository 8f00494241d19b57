"""Why something was decided: every decision of the core carries one."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Reason:
    """A stable code, a sentence with the numbers in it, and the numbers again for machines.

    `code` is UPPER_SNAKE and documented where it is made; `text` names units; `numbers` keys carry their unit as a
    suffix where it is not tokens or a count (`_s` seconds, `_share` 0..1).
    """

    code: str
    text: str
    numbers: Mapping[str, float] = field(default_factory=dict, hash=False)
