"""Step times of an inference engine: what is read, computed, launched and sent, each by a constant.

A decoding step of b sequences with c tokens of context in all takes

    dense_read   * (dense + output embedding) bytes / tp / HBM            the weights that every token passes
  + expert_read  * expert bytes * (1 - (1 - k/E)^b) / tp / HBM            those of the experts that the batch touches
  + kv_read      * c * KV bytes per token and device / HBM                KV heads replicated where tp > kv_heads
  + arithmetic   * 2 * active parameters * b / tp / FLOPS
  + layers * (layer_s + moe_layer_s + dispatch_s * k * b)
  + layers * (collective_s + collective_bytes * b * all-reduce bytes / NVLink)            where tp > 1

and is linear in the constants, in 1, b, c and the touched share, so that for one tp it comes down to four numbers; the
prefill of n tokens behind m cached ones likewise, in 1, n, n * (m + n / 2) and the touched share. A ring all-reduce
sends 2 (tp - 1) / tp of its data; a layer has two, each of b hidden states (Megatron-LM, arXiv 1909.08053).
"""

from dataclasses import replace
from typing import TypeVar

from services.common.errors import ConfigError
from services.simulator.hardware import (
    BF16,
    AcceleratorType,
    DecodeConstants,
    Hardware,
    ModelShape,
    PrefillConstants,
)
from services.simulator.times import EngineTimes
from services.simulator.transfers import host_copy_s, weight_sync_s

C = TypeVar("C", DecodeConstants, PrefillConstants)
Row = tuple[float, float, float, float]
"""What one constant multiplies, as factors of the four quantities of a step."""

LARGEST_TP = 1_024
SLOWEST_STEP_S = 100.0
"""Of one token: a machine or model that is slower by far is a mistake in its file, and its episodes would not end."""


def decode_terms(accelerator: AcceleratorType, model: ModelShape, tp: int) -> dict[str, Row]:
    """By constant of DecodeConstants: seconds per (1, sequence, context token, touched share of the experts)."""
    hbm, flops = accelerator.hbm_bytes_s * tp, accelerator.flops * tp
    layers = float(model.layers)
    computed = model.dense_parameters + model.embedding_parameters + model.active_expert_parameters
    return {
        "dense_read": ((model.dense_parameters + model.embedding_parameters) * BF16 / hbm, 0.0, 0.0, 0.0),
        "expert_read": (0.0, 0.0, 0.0, model.expert_parameters * BF16 / hbm),
        "kv_read": (0.0, 0.0, model.kv_bytes_per_token(tp) / accelerator.hbm_bytes_s, 0.0),
        "arithmetic": (0.0, 2.0 * computed / flops, 0.0, 0.0),
        "layer_s": (layers, 0.0, 0.0, 0.0),
        "moe_layer_s": (layers if model.experts else 0.0, 0.0, 0.0, 0.0),
        "dispatch_s": (0.0, layers * model.experts_per_token, 0.0, 0.0),
        "collective_s": (layers if tp > 1 else 0.0, 0.0, 0.0, 0.0),
        "collective_bytes": (0.0, all_reduce_bytes(model, tp) / accelerator.nvlink_bytes_s, 0.0, 0.0),
    }


def prefill_terms(accelerator: AcceleratorType, model: ModelShape, tp: int) -> dict[str, Row]:
    """By constant of PrefillConstants: seconds per (1, new token, pair of tokens that attend, touched share)."""
    hbm, flops = accelerator.hbm_bytes_s * tp, accelerator.flops * tp
    layers, state = float(model.layers), model.layers * model.hidden * BF16 / accelerator.hbm_bytes_s
    attention = 4.0 * model.layers * model.heads * model.head_dim / flops
    return {
        "dense_arithmetic": (0.0, 2.0 * model.dense_parameters / flops, 0.0, 0.0),
        "expert_arithmetic": (0.0, 2.0 * model.active_expert_parameters / flops, 0.0, 0.0),
        "attention": (0.0, 0.0, attention, 0.0),
        "weight_read": (model.dense_parameters * BF16 / hbm, 0.0, 0.0, model.expert_parameters * BF16 / hbm),
        "elementwise": (0.0, state, 0.0, 0.0),
        "dispatch": (0.0, state * model.experts_per_token, 0.0, 0.0),
        "layer_s": (layers, 0.0, 0.0, 0.0),
        "collective_s": (layers if tp > 1 else 0.0, 0.0, 0.0, 0.0),
        "collective_bytes": (0.0, all_reduce_bytes(model, tp) / accelerator.nvlink_bytes_s, 0.0, 0.0),
    }


def all_reduce_bytes(model: ModelShape, tp: int) -> float:
    """Sent by each device for one token, over all layers."""
    return 2.0 * model.layers * model.hidden * BF16 * 2.0 * (tp - 1) / tp


def decode_quantities(model: ModelShape, sequences: float, context_tokens: float) -> Row:
    """What the rows of `decode_terms` are factors of."""
    return (1.0, float(sequences), float(context_tokens), model.touched_share(sequences))


def prefill_quantities(model: ModelShape, new_tokens: float, cached_tokens: float) -> Row:
    """What the rows of `prefill_terms` are factors of."""
    return (1.0, new_tokens, new_tokens * (cached_tokens + new_tokens / 2), model.touched_share(new_tokens))


def with_extra(constants: C, hardware: Hardware, model: ModelShape) -> C:
    """The constants as the cluster's extra changes them."""
    extra = hardware.extra
    if extra.collective_bytes_s:
        slower = hardware.accelerator.nvlink_bytes_s / extra.collective_bytes_s
        constants = replace(constants, collective_bytes=slower)
    return replace(constants, collective_s=constants.collective_s + extra.tp_step_s / model.layers)


def weigh(constants: DecodeConstants | PrefillConstants, terms: dict[str, Row]) -> Row:
    """Seconds per quantity, all terms together."""
    weighed = [[getattr(constants, name) * factor for factor in row] for name, row in terms.items()]
    one, two, three, four = (sum(column) for column in zip(*weighed, strict=True))
    return one, two, three, four


def activation_bytes(model: ModelShape, tokens: int) -> float:
    """Of one layer's pass over so many tokens: hidden state, residual, attention in and out, both halves of the MLP."""
    return float((4 * model.hidden + 2 * model.intermediate * max(1, model.experts_per_token)) * BF16 * tokens)


class ModelledEngine(EngineTimes):
    """EngineTimes of one model on one kind of machine. Times for a tp are prepared at its first use.

    Prefill is a step of its own: weights that a decoding step reads at the same time are read twice here.
    """

    def __init__(self, hardware: Hardware, model: ModelShape) -> None:
        self.hardware = hardware
        self.model = model
        self._miss = 1.0 - model.experts_per_token / model.experts if model.experts else 1.0
        """Share of the experts that one token leaves alone."""
        self._decode: dict[int, Row] = {}
        self._prefill: dict[int, Row] = {}

    def decode_s(self, tp: int, sequences: float, context_tokens: float) -> float:
        """See EngineTimes; no sequences take no time. A mean number of sequences may be no whole one."""
        if sequences <= 0:
            return 0.0
        row = self._decode.get(tp) or self._prepare_decode(tp)
        touched: float = 1.0 - self._miss**sequences
        return row[0] + row[1] * sequences + row[2] * context_tokens + row[3] * touched

    def prefill_s(self, tp: int, new_tokens: float, cached_tokens: float) -> float:
        """See EngineTimes; no tokens take no time."""
        if new_tokens <= 0:
            return 0.0
        row = self._prefill.get(tp) or self._prepare_prefill(tp)
        touched: float = 1.0 - self._miss**new_tokens
        pairs = new_tokens * (cached_tokens + new_tokens / 2)
        return row[0] + row[1] * new_tokens + row[2] * pairs + row[3] * touched

    def kv_tokens(self, tp: int) -> int:
        """See EngineTimes. ConfigError if the weights leave no room; `fits` asks without raising."""
        if not self.fits(tp):
            raise ConfigError(self._too_large(tp))
        return int(self._spare_bytes(tp) / self.model.kv_bytes_per_token(tp))

    def fits(self, tp: int, tokens: int = 1) -> bool:
        """True if the weights and the KV cache of so many tokens fit."""
        return self._spare_bytes(tp) >= tokens * self.model.kv_bytes_per_token(tp)

    def smallest_tp(self, tokens: int = 1) -> int:
        """Smallest power of two that holds the weights and the KV cache of so many tokens; ConfigError if none does."""
        tp = 1
        while not self.fits(tp, tokens):
            tp *= 2
            if tp > LARGEST_TP:
                raise ConfigError(f"{self._too_large(tp)}; none up to {LARGEST_TP:,} does")
        return tp

    def kv_move_s(self, tokens: float, *, same_node: bool) -> float:
        """See EngineTimes: over one NVLink port or one network interface."""
        move = self.hardware.operations.kv_move
        link = self.hardware.accelerator.nvlink_bytes_s if same_node else self.hardware.node.network_bytes_s
        return move.latency_s + tokens * self.model.kv_bytes_per_token() / (link * move.link_efficiency)

    def load_s(self, tp: int) -> float:
        """See EngineTimes: the weights of all devices come through one reader, whatever tp."""
        del tp
        start = self.hardware.operations.cold_start
        return start.base_s + self.model.weight_bytes / start.load_bytes_s

    def sleep_s(self, tp: int) -> float:
        """See EngineTimes."""
        return host_copy_s(self.hardware, self.model.weight_bytes, tp)

    def wake_s(self, tp: int) -> float:
        """See EngineTimes: the same bytes the other way."""
        return self.sleep_s(tp)

    def weight_update_s(self, trainer_accelerators: int, rollout_accelerators: int) -> float:
        """See EngineTimes: gathered from the trainers' shards at one rate, however many they are, then broadcast."""
        del trainer_accelerators
        return weight_sync_s(self.hardware, self.model.weight_bytes, rollout_accelerators, gathered=True)

    def _spare_bytes(self, tp: int) -> float:
        """Of one device, for the KV cache."""
        if tp < 1:
            raise ConfigError(f"tp is {tp}; expected at least 1")
        memory = self.hardware.operations.memory
        taken = (
            self.model.weight_bytes / tp + memory.reserved_bytes + activation_bytes(self.model, memory.batched_tokens)
        )
        return self.hardware.engine_bytes - taken

    def _too_large(self, tp: int) -> str:
        accelerator = self.hardware.accelerator
        return (
            f"{self.model.name} does not fit on {tp} x {accelerator.name}: its weights take "
            f"{self.model.weight_bytes / tp / 1e9:.1f} GB of the {self.hardware.engine_bytes / 1e9:.1f} GB that an "
            f"engine may use of each, and leave no room for a KV cache; raise tp or take a smaller model"
        )

    def _prepare_decode(self, tp: int) -> Row:
        terms = decode_terms(self.hardware.accelerator, self.model, tp)
        self._decode[tp] = self._checked(tp, weigh(with_extra(self.hardware.decode, self.hardware, self.model), terms))
        return self._decode[tp]

    def _prepare_prefill(self, tp: int) -> Row:
        terms = prefill_terms(self.hardware.accelerator, self.model, tp)
        self._prefill[tp] = self._checked(
            tp, weigh(with_extra(self.hardware.prefill, self.hardware, self.model), terms)
        )
        return self._prefill[tp]

    def _checked(self, tp: int, row: Row) -> Row:
        """Raises ConfigError for steps that take no time, or that no job would wait for; NaN is either."""
        if not 0.0 < sum(row) <= SLOWEST_STEP_S:
            raise ConfigError(
                f"a step of one token of {self.model.name} takes {sum(row):.3g} s on {tp} x "
                f"{self.hardware.accelerator.name}; expected above 0 and at most {SLOWEST_STEP_S:g}: correct the rates "
                f"and constants of the machine, or the model's size"
            )
        return row
