"""One transition table for each lifecycle: (state, event) -> state. A pair that is not listed is an error.

States and events are plain strings, the names of the contract's enum values without their prefix, so that tables,
database, events and messages all read alike.
"""

from collections.abc import Mapping
from dataclasses import dataclass

Table = Mapping[tuple[str, str], str]


class IllegalTransition(Exception):
    """The (state, event) pair is not in the table."""

    def __init__(self, kind: str, name: str, state: str, event: str) -> None:
        super().__init__(f"{kind} {name} is {state}; {event} is not possible from there")
        self.kind, self.name, self.state, self.event = kind, name, state, event


@dataclass(frozen=True, slots=True)
class Lifecycle:
    """The table of one kind of thing."""

    kind: str
    initial: str
    table: Table
    terminal: frozenset[str]

    def next(self, name: str, state: str, event: str) -> str:
        """The state after `event`; IllegalTransition if the pair is not listed."""
        try:
            return self.table[state, event]
        except KeyError:
            raise IllegalTransition(self.kind, name, state, event) from None

    def allows(self, state: str, event: str) -> bool:
        """True if the pair is listed."""
        return (state, event) in self.table

    @property
    def states(self) -> frozenset[str]:
        """All states that the table names."""
        return frozenset(s for s, _ in self.table) | frozenset(self.table.values()) | {self.initial}


def _each(states: str, event: str, to: str) -> dict[tuple[str, str], str]:
    return {(state, event): to for state in states.split()}


SESSION = Lifecycle(
    "session",
    "ALIVE",
    {
        **_each("ALIVE RECOVERING", "close", "CLOSED"),
        **_each("ALIVE RECOVERING", "expire", "EXPIRED"),
        **_each("ALIVE RECOVERING", "fence", "FENCED"),
        **_each("ALIVE RECOVERING", "take_over", "RECOVERING"),
        **_each("ALIVE RECOVERING", "reported_in_full", "ALIVE"),
    },
    frozenset({"CLOSED", "EXPIRED", "FENCED"}),
)

REPLICA = Lifecycle(
    "replica",
    "PLANNED",
    {
        ("PLANNED", "grant"): "STARTING",
        ("PLANNED", "withdraw"): "RELEASED",
        ("STARTING", "admit"): "ACTIVE",
        ("ACTIVE", "suspect"): "SUSPECT",
        ("SUSPECT", "clear"): "ACTIVE",
        **_each("ACTIVE SUSPECT", "cordon", "CORDONED"),
        ("CORDONED", "uncordon"): "ACTIVE",
        **_each("ACTIVE CORDONED SUSPECT", "drain", "DRAINING"),
        ("DRAINING", "undrain"): "ACTIVE",
        **_each("STARTING ACTIVE CORDONED DRAINING SUSPECT", "release", "RELEASING"),
        **_each("STARTING ACTIVE CORDONED DRAINING RELEASING SUSPECT", "owner_lost", "UNCONFIRMED"),
        **_each("RELEASING UNCONFIRMED QUARANTINED", "confirmed", "RELEASED"),
        **_each("UNCONFIRMED RELEASING", "cannot_confirm", "QUARANTINED"),
        **_each("STARTING ACTIVE CORDONED DRAINING RELEASING SUSPECT UNCONFIRMED QUARANTINED", "retire", "RETIRED"),
    },
    frozenset({"RELEASED", "RETIRED"}),
)

REASSIGNMENT = Lifecycle(
    "reassignment",
    "PENDING",
    {
        ("PENDING", "start"): "DRAINING",
        ("DRAINING", "drained"): "RELEASING",
        ("RELEASING", "all_confirmed"): "GRANTING",
        ("GRANTING", "all_granted"): "LOADING",
        ("LOADING", "all_loaded"): "SUCCEEDED",
        **_each("PENDING DRAINING RELEASING GRANTING LOADING", "fail", "ROLLING_BACK"),
        ("ROLLING_BACK", "restored"): "ROLLED_BACK",
        ("ROLLING_BACK", "not_restored"): "FAILED",
    },
    frozenset({"SUCCEEDED", "ROLLED_BACK", "FAILED"}),
)

COMMAND = Lifecycle(
    "command",
    "PENDING",
    {
        ("PENDING", "deliver"): "DELIVERED",
        ("DELIVERED", "deliver"): "DELIVERED",
        **_each("PENDING DELIVERED ACCEPTED", "accept", "ACCEPTED"),
        **_each("PENDING DELIVERED ACCEPTED", "succeed", "SUCCEEDED"),
        **_each("PENDING DELIVERED ACCEPTED", "fail", "FAILED"),
        **_each("PENDING DELIVERED ACCEPTED", "expire", "EXPIRED"),
        **_each("PENDING DELIVERED ACCEPTED", "supersede", "SUPERSEDED"),
    },
    frozenset({"SUCCEEDED", "FAILED", "EXPIRED", "SUPERSEDED"}),
)

TRAJECTORY = Lifecycle(
    "trajectory",
    "QUEUED",
    {
        ("QUEUED", "lease"): "LEASED",
        **_each("LEASED", "requeue", "QUEUED"),
        ("LEASED", "score"): "SCORED",
        ("SCORED", "close_group"): "READY",
        ("READY", "take"): "BATCHED",
        ("BATCHED", "return"): "READY",
        ("BATCHED", "commit"): "TRAINED",
        **_each("SCORED READY", "filter", "FILTERED"),
        **_each("QUEUED LEASED SCORED READY", "go_stale", "STALE"),
        **_each("QUEUED LEASED SCORED READY BATCHED", "void", "VOID"),
        **_each("QUEUED LEASED SCORED", "cancel", "CANCELLED"),
        ("SCORED", "deliver"): "DELIVERED",
    },
    frozenset({"TRAINED", "FILTERED", "STALE", "VOID", "CANCELLED", "DELIVERED"}),
)

GROUP = Lifecycle(
    "group",
    "OPEN",
    {
        ("OPEN", "close"): "CLOSED",
        **_each("OPEN CLOSED", "finish", "DONE"),
        ("CLOSED", "take"): "BATCHED",
        ("BATCHED", "return"): "CLOSED",
        ("BATCHED", "finish"): "DONE",
    },
    frozenset({"DONE"}),
)

VERSION = Lifecycle(
    "weight version",
    "COMMITTED",
    {
        ("COMMITTED", "publish"): "PUBLISHED",
        **_each("COMMITTED PUBLISHED", "abandon", "ABANDONED"),
        ("PUBLISHED", "expire"): "EXPIRED",
    },
    frozenset({"ABANDONED", "EXPIRED"}),
)

MANIFEST = Lifecycle(
    "manifest",
    "TAKEN",
    {
        ("TAKEN", "commit"): "COMMITTED",
        ("TAKEN", "return"): "RETURNED",
        ("COMMITTED", "cover"): "COVERED",
        **_each("TAKEN COMMITTED COVERED", "abandon", "ABANDONED"),
    },
    frozenset({"RETURNED", "ABANDONED", "COVERED"}),
)

RUN = Lifecycle(
    "run",
    "ACTIVE",
    {
        ("ACTIVE", "pause"): "PAUSED",
        ("PAUSED", "resume"): "ACTIVE",
        **_each("ACTIVE PAUSED", "finish", "FINISHED"),
        **_each("ACTIVE PAUSED", "cancel", "CANCELLED"),
    },
    frozenset({"FINISHED", "CANCELLED"}),
)

ALL = (SESSION, REPLICA, REASSIGNMENT, COMMAND, TRAJECTORY, GROUP, VERSION, MANIFEST, RUN)
