"""One rollout engine as a fluid: continuous batching without a loop over tokens.

All running sequences gain one token per decoding step, so a single counter, `progress` (tokens generated per running
sequence since the engine began), says where each of them stands: one that started at progress m with t tokens to go
ends at m + t, and a heap keyed by that end gives the next event. Contexts sum to `base + n x progress`. The step time
is asked for at each event and whenever contexts grew by GROWTH, for the middle of the stretch ahead.

Prefill stalls decoding for its duration: chunked prefill spreads the same work over steps, so its total cost is kept
and the finer interleaving is not. A sibling on the engine shares the prompt's prefill, though not its memory.

KV cache: running sequences hold their contexts; those in a tool call keep theirs as cache, evicted least recently used
first when others need room; what is not cached is computed again. Admission is first come, first served, and waits
while the cache is full. If running contexts outgrow it, the youngest is preempted and recomputed, as vLLM does.
"""

import heapq
from collections import OrderedDict, deque

from services.simulator.times import EngineTimes
from services.simulator.trajectory import NOWHERE, Sequence

GROWTH = 0.05
"""Relative growth of contexts after which the step time is asked for anew."""
MIN_STRETCH = 16.0
"""Tokens: short contexts are not asked for more often than this."""
NEAR = 1e-6
"""Tokens: rounding of progress."""
WATERMARK = 0.99
"""Share of the KV cache that admission fills; the rest is for the next tokens of those running."""
NEVER = float("inf")


class EngineState:
    """What a scheduler sees of an engine."""

    __slots__ = (
        "admitting",
        "alive",
        "assigned",
        "cached",
        "context",
        "index",
        "kv_capacity",
        "max_running",
        "node",
        "running",
        "seconds_per_token",
        "tp",
        "version",
        "waiting",
    )

    def __init__(self, index: int, tp: int, node: int, kv_capacity: int, max_running: int) -> None:
        self.index = index
        self.tp = tp
        self.node = node
        self.kv_capacity = kv_capacity
        """Tokens."""
        self.max_running = max_running
        self.alive = True
        """False once its end was noticed, or when it was taken away."""
        self.admitting = False
        self.assigned = 0
        """Trajectories whose home it is: running, waiting here, or in a tool call."""
        self.running = 0
        self.waiting = 0
        self.context = 0.0
        """Tokens of the running ones, as of the engine's last event."""
        self.cached = 0
        """Tokens kept for those in tool calls."""
        self.seconds_per_token = 0.0
        """Of each running sequence; 0 before the first."""
        self.version = 0


class Engine:
    """See the module. The cluster calls `advance(now)` before anything else at a time."""

    __slots__ = (
        "_base", "_cached", "_clock", "_heap", "_order", "_prompts", "_running", "_stall", "_step", "_times",
        "_waiting", "busy_s", "frozen", "generated", "next_event", "preemptions", "prefilled", "progress", "slowdown",
        "started_at", "state", "stopped_at",
    )  # fmt: skip

    def __init__(self, state: EngineState, times: EngineTimes, now: float) -> None:
        self.state = state
        self._times = times
        self._clock = now
        self._base = 0.0
        self._heap: list[tuple[float, int, int, Sequence]] = []
        self._running: dict[Sequence, None] = {}
        """In order of admission: the last is the youngest."""
        self._waiting: deque[Sequence] = deque()
        self._cached: OrderedDict[Sequence, int] = OrderedDict()
        self._prompts: dict[str, int] = {}
        self._order = 0
        self._stall = 0.0
        self._step = 0.0
        self.progress = 0.0
        self.next_event = NEVER
        self.frozen = False
        self.slowdown = 1.0
        self.busy_s = 0.0
        self.generated = 0
        """Tokens, lost ones included."""
        self.prefilled = 0
        self.preemptions = 0
        self.started_at = now
        self.stopped_at = NEVER

    def advance(self, now: float) -> None:
        """Brings progress to `now`."""
        passed = now - self._clock
        if passed <= 0:
            return
        self._clock = now
        if self.frozen or not self._running:
            if not self.frozen and self._stall > 0:
                self.busy_s += min(passed, self._stall)
                self._stall = max(0.0, self._stall - passed)
            return
        self.busy_s += passed
        if self._stall >= passed:
            self._stall -= passed
            return
        self.progress += (passed - self._stall) / self._step
        self._stall = 0.0

    def submit(self, sequence: Sequence) -> None:
        """A turn to be generated; starts when there is room."""
        self._waiting.append(sequence)

    def finished(self) -> list[Sequence]:
        """Sequences whose turn has ended by now, taken off; their contexts stay cached."""
        done = []
        heap, limit = self._heap, self.progress + NEAR
        while heap and heap[0][0] <= limit:
            _, _, stamp, sequence = heapq.heappop(heap)
            if stamp != sequence.stamp:
                continue
            self._stop(sequence, sequence.left)
            self._keep(sequence, sequence.seen.context)
            done.append(sequence)
        return done

    def settle(self) -> None:
        """After any change: preempts what has outgrown the cache, admits what fits, and sets the next event."""
        self._make_room()
        if self._waiting:
            self._admit()
        self._retime()

    def take(self, sequence: Sequence) -> int:
        """Removes a sequence in any state here; its tokens so far stay with it. The tokens cached here are returned."""
        held = self._cached.pop(sequence, 0)
        self.state.cached -= held
        if sequence in self._running:
            made = min(sequence.left, int(self.progress - sequence.mark + NEAR))
            self._stop(sequence, made)
            return sequence.seen.context
        if sequence.ready and sequence in self._waiting:
            self._waiting.remove(sequence)
        return held

    def drop(self, sequence: Sequence) -> None:
        """The trajectory has ended: nothing of it is kept."""
        self.state.cached -= self._cached.pop(sequence, 0)

    def deposit(self, sequence: Sequence, tokens: int) -> bool:
        """KV cache copied from another engine; False if there is no room for it."""
        if self._held() + tokens > self.state.kv_capacity * WATERMARK:
            return False
        self._keep(sequence, tokens)
        self._evict(0.0, sequence)
        return True

    def present(self) -> None:
        """Writes each running trajectory's tokens so far where policies look."""
        for sequence in self._running:
            made = min(sequence.left, int(self.progress - sequence.mark + NEAR))
            seen = sequence.seen
            if made:
                seen.generated += made
                seen.context += made
                self.generated += made
                sequence.left -= made
                sequence.mark += made  # as much as its context: the base stays
        self.state.context = self._held()

    def update(self, version: int, seconds: float, *, recompute: bool) -> None:
        """New weights: a pause and, with `recompute`, the KV cache of everything here is computed again."""
        self.state.version = version
        self._stall += seconds
        if not recompute:
            return
        self._cached.clear()
        self.state.cached = 0
        for sequence in self._running:
            tokens = sequence.seen.context
            self._stall += self._times.prefill_s(self.state.tp, tokens, 0.0) * self.slowdown
            self.prefilled += tokens

    def _held(self) -> float:
        """Tokens of the running contexts, now."""
        return self._base + len(self._running) * self.progress

    def _start(self, sequence: Sequence, cached: int) -> None:
        seen = sequence.seen
        context = seen.context
        share = seen.prompt if cached < seen.prompt and self._prompts.get(seen.group, 0) > 0 else 0
        known = min(context, max(cached, share))
        if context > known:
            self._stall += self._times.prefill_s(self.state.tp, context - known, known) * self.slowdown
            self.prefilled += context - known
        self._prompts[seen.group] = self._prompts.get(seen.group, 0) + 1
        if seen.version == NOWHERE:
            seen.version = self.state.version
        self._order += 1
        sequence.stamp += 1
        sequence.mark = self.progress
        sequence.end = self.progress + sequence.left
        self._running[sequence] = None
        self._base += context - self.progress
        heapq.heappush(self._heap, (sequence.end, self._order, sequence.stamp, sequence))

    def _stop(self, sequence: Sequence, made: int) -> None:
        """Takes a running sequence off with `made` more tokens of its turn."""
        seen = sequence.seen
        del self._running[sequence]
        self._base -= seen.context - sequence.mark
        if not self._running:
            self._base = 0.0
        seen.generated += made
        seen.context += made
        self.generated += made
        sequence.left -= made
        sequence.stamp += 1
        self._forget_prompt(sequence)

    def _forget_prompt(self, sequence: Sequence) -> None:
        group = sequence.seen.group
        count = self._prompts.get(group, 0)
        if count > 1:
            self._prompts[group] = count - 1
        elif count:
            del self._prompts[group]

    def _keep(self, sequence: Sequence, tokens: int) -> None:
        self._cached[sequence] = tokens
        self.state.cached += tokens

    def _evict(self, need: float, spared: Sequence | None = None) -> None:
        """Drops the least recently used contexts until `need` more tokens fit."""
        room = self.state.kv_capacity - self._held() - need
        cached = self._cached
        while self.state.cached > room and cached:
            first = next(iter(cached))
            if first is spared:
                if len(cached) == 1:
                    break
                cached.move_to_end(first)
                continue
            self.state.cached -= cached.pop(first)

    def _make_room(self) -> None:
        capacity = self.state.kv_capacity
        while len(self._running) > 1 and self._held() > capacity - len(self._running) * NEAR - 1.0:
            youngest = next(reversed(self._running))
            self._stop(youngest, min(youngest.left, int(self.progress - youngest.mark + NEAR)))
            self._waiting.appendleft(youngest)
            self.preemptions += 1
        if self.state.cached:
            self._evict(0.0)

    def _admit(self) -> None:
        state, waiting, cached = self.state, self._waiting, self._cached
        limit = state.kv_capacity * WATERMARK
        while waiting and len(self._running) < state.max_running:
            sequence = waiting[0]
            need = sequence.seen.context
            if self._running and self._held() + need > limit:
                return
            waiting.popleft()
            hit = cached.pop(sequence, 0)
            state.cached -= hit
            if state.cached:
                self._evict(float(need))
            self._start(sequence, hit)

    def _retime(self) -> None:
        state, count = self.state, len(self._running)
        state.running, state.waiting = count, len(self._waiting)
        if not count or self.frozen:
            state.context = 0.0
            self.next_event = NEVER
            return
        heap = self._heap
        while heap[0][2] != heap[0][3].stamp:
            heapq.heappop(heap)
        context = self._held()
        state.context = context
        ahead = heap[0][0] - self.progress
        stretch = max(MIN_STRETCH, GROWTH * context / count)
        ahead = min(ahead, stretch)
        room = (state.kv_capacity - context) / count
        if count > 1 and room < ahead:
            ahead = max(room, NEAR)
        ahead = max(ahead, 0.0)
        self._step = step = self._times.decode_s(state.tp, count, context + 0.5 * ahead * count) * self.slowdown
        state.seconds_per_token = step
        self.next_event = self._clock + self._stall + ahead * step
