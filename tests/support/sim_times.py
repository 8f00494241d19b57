"""Times for the simulator's tests: constant rates, and one with a meaning."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ConstantTimes:
    """A token of each sequence costs `step` seconds whatever else runs; prefill, moves and starts cost nothing."""

    step: float = 0.01
    kv: int = 1_000_000
    prefill: float = 0.0
    move: float = 0.0
    start: float = 0.0
    update: float = 0.0

    def decode_s(self, tp, sequences, context_tokens):
        return self.step

    def prefill_s(self, tp, new_tokens, cached_tokens):
        return self.prefill * new_tokens

    def kv_tokens(self, tp):
        return self.kv

    def kv_move_s(self, tokens, *, same_node):
        return self.move

    def load_s(self, tp):
        return self.start

    sleep_s = load_s
    wake_s = load_s

    def weight_update_s(self, trainer_accelerators, rollout_accelerators):
        return self.update


@dataclass(frozen=True)
class LinearTimes:
    """decode = weights / tp + communication + per sequence + per context token / tp: Qwen3-14B on an A100, roughly."""

    weights: float = 0.0185
    collective: float = 0.0012
    sequence: float = 0.00012
    context: float = 1.1e-7
    prefill: float = 1.1e-4
    kv: int = 270_000

    def decode_s(self, tp, sequences, context_tokens):
        comm = self.collective if tp > 1 else 0.0
        return (self.weights + self.sequence * sequences + self.context * context_tokens) / tp + comm

    def prefill_s(self, tp, new_tokens, cached_tokens):
        return new_tokens * (self.prefill + 2e-9 * (cached_tokens + new_tokens / 2)) / tp

    def kv_tokens(self, tp):
        return int(self.kv * tp + 170_000 * (tp - 1))

    def kv_move_s(self, tokens, *, same_node):
        return 0.05 + tokens * (8e-6 if same_node else 1.7e-5)

    def load_s(self, tp):
        return 40.0

    def sleep_s(self, tp):
        return 4.0

    def wake_s(self, tp):
        return 3.0

    def weight_update_s(self, trainer_accelerators, rollout_accelerators):
        return 4.0


@dataclass(frozen=True)
class LinearTraining:
    """Tokens per second and accelerator, a fixed part, the accelerators of one replica, seconds of copying its state."""

    rate: float = 950.0
    fixed: float = 5.0
    least: int = 8
    offload: float = 0.0

    def step_s(self, replicas, accelerators_each, sequence_tokens):
        return self.fixed + sum(sequence_tokens) / (self.rate * replicas * accelerators_each)

    def min_accelerators(self):
        return self.least

    def offload_s(self, replicas, accelerators_each):
        return self.offload
