"""A trajectory under way: what everyone may see of it, and, apart from that, what only the simulator knows."""

from services.simulator.workload import Episode, Turn

NOWHERE = -1


class Trajectory:
    """What a scheduler knows of a trajectory: its past. One writer, the simulator; policies read it. No later turn can
    be reached from here.
    """

    __slots__ = (
        "batch",
        "context",
        "engine",
        "generated",
        "group",
        "id",
        "in_tool",
        "index",
        "moves",
        "outcome",
        "prompt",
        "since",
        "tool",
        "tool_s",
        "turns",
        "version",
    )

    def __init__(self, index: int, episode: Episode, batch: int, now: float) -> None:
        self.index = index
        """Rank of admission."""
        self.id = episode.id
        self.group = episode.group
        self.prompt = episode.prompt
        self.batch = batch
        """Training step that its prompt was admitted for."""
        self.context = episode.prompt
        """Tokens of the sequence so far. Within a turn up to date in `decide` only; else as of the turn's start."""
        self.generated = 0
        """Tokens generated so far; within a turn like `context`."""
        self.turns = 0
        """Turns finished."""
        self.engine = NOWHERE
        """Engine that has it, also through tool calls; NOWHERE while queued."""
        self.since = now
        """When it got its engine."""
        self.in_tool = False
        self.tool_s = 0.0
        """Seconds in calls that have returned."""
        self.tool = ""
        """Last call that returned, and its outcome."""
        self.outcome = ""
        self.moves = 0
        self.version = NOWHERE
        """Oldest weight version that any of its tokens was generated with; NOWHERE before the first."""


class Sequence:
    """The simulator's side of a trajectory: the turns to come and where the present one stands."""

    __slots__ = (
        "copied_at",
        "end",
        "episode",
        "kept",
        "left",
        "mark",
        "pending",
        "ready",
        "seen",
        "stamp",
        "total",
        "turn",
    )

    def __init__(self, seen: Trajectory, episode: Episode) -> None:
        self.seen = seen
        self.episode = episode
        self.turn = 0
        """The turn under way."""
        self.left = episode.turns[0].generated
        """Tokens of it still to be generated when it last started on an engine."""
        self.kept = 0
        """Tokens of it that were handed in when it last changed engines: no failure loses them."""
        self.mark = 0.0
        """The engine's progress when it started there."""
        self.end = 0.0
        """The engine's progress at which the turn ends."""
        self.stamp = 0
        """Counts starts on engines: older heap entries are void."""
        self.ready = True
        """False during a tool call."""
        self.pending: int | None = None
        """Engine to move to at the turn's end; None = stay."""
        self.copied_at = 0.0
        """When the KV cache that is copied to its engine is there."""
        self.total = episode.generated

    @property
    def current(self) -> Turn:
        """The turn under way."""
        return self.episode.turns[self.turn]
