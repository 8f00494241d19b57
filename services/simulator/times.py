"""What the simulator asks about time and memory. `steptimes.py` and `trainingtimes.py` answer from profiles, tests with
constants.
"""

from typing import Protocol


class EngineTimes(Protocol):
    """One model served by one engine of `tp` accelerators. Seconds and tokens; pure, cheap enough for every event."""

    def decode_s(self, tp: int, sequences: int, context_tokens: float) -> float:
        """One decoding step of `sequences` whose contexts sum to `context_tokens`; every sequence gains a token."""
        ...

    def prefill_s(self, tp: int, new_tokens: float, cached_tokens: float) -> float:
        """Computing the KV cache of `new_tokens` of one sequence behind `cached_tokens` that are in the cache."""
        ...

    def kv_tokens(self, tp: int) -> int:
        """Tokens that the engine's KV cache holds."""
        ...

    def kv_move_s(self, tokens: float, *, same_node: bool) -> float:
        """Copying the KV cache of so many tokens to another engine."""
        ...

    def load_s(self, tp: int) -> float:
        """From nothing to an engine that serves."""
        ...

    def sleep_s(self, tp: int) -> float:
        """An engine gives its memory back and keeps its weights in the host's memory."""
        ...

    def wake_s(self, tp: int) -> float:
        """The reverse of `sleep_s`."""
        ...

    def weight_update_s(self, trainer_accelerators: int, rollout_accelerators: int) -> float:
        """New weights from the trainers to all engines, until the last one serves them."""
        ...


class TrainingTimes(Protocol):
    """One policy trained by data-parallel replicas."""

    def step_s(self, replicas: int, accelerators_each: int, sequence_tokens: list[int]) -> float:
        """One training step (proximal log-probabilities, forward, backward, reduction, update) over all sequences.

        The sequences are sharded over the replicas so that their token counts balance, and packed by token budget.
        """
        ...

    def min_accelerators(self) -> int:
        """Fewest accelerators that hold one replica: weights, gradients, optimizer state, activations."""
        ...

    def offload_s(self, replicas: int, accelerators_each: int) -> float:
        """The state of so many replicas to their hosts' memory at once, or back."""
        ...
