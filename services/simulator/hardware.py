"""What a simulated machine and model are: datasheet figures, shapes, and the constants that were fitted to tables.

Constants multiply times that a datasheet allows (1 = the datasheet is reached, 1.25 = 80 % of it) or are seconds of
their own. `steptimes.py` makes times of an engine from them, `trainingtimes.py` those of a training step;
`calibrate.py` fits them. bf16 everywhere: two bytes a parameter and a KV element.
"""

import math
from dataclasses import dataclass, field

BF16 = 2
"""Bytes of a weight, activation or KV element."""


@dataclass(frozen=True, slots=True)
class AcceleratorType:
    """One accelerator, as its datasheet says. Links are bytes per second in one direction."""

    name: str
    hbm_bytes: float
    """All memory of the device."""
    hbm_bytes_s: float
    flops: float
    """Dense bf16 operations per second, without sparsity."""
    nvlink_bytes_s: float
    pcie_bytes_s: float


@dataclass(frozen=True, slots=True)
class NodeTopology:
    """One node: accelerators joined by NVLink, each with a network interface of its own."""

    accelerators: int
    network_bytes_s: float
    """Of one accelerator's interface, in one direction."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder-only transformer with grouped-query attention and gated MLPs, dense or mixture of experts."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    """Width of the MLP, or of one expert."""
    vocabulary: int
    parameters: float
    active_parameters: float
    """Parameters that one token passes, embeddings included."""
    experts: int = 0
    """0: dense."""
    experts_per_token: int = 0
    tied_embeddings: bool = False

    @property
    def expert_parameters(self) -> float:
        """Parameters of all experts; 0 for dense models."""
        return 3.0 * self.layers * self.hidden * self.intermediate * self.experts

    @property
    def embedding_parameters(self) -> float:
        """Of one embedding matrix: the input's is only looked up, the output's is read at each step."""
        return float(self.vocabulary * self.hidden)

    @property
    def dense_parameters(self) -> float:
        """Matrices that every token passes, but for experts and embeddings."""
        embeddings = self.embedding_parameters * (1 if self.tied_embeddings else 2)
        return self.parameters - self.expert_parameters - embeddings

    @property
    def active_expert_parameters(self) -> float:
        """Parameters of the experts that one token is sent to."""
        return self.expert_parameters * self.experts_per_token / self.experts if self.experts else 0.0

    @property
    def weight_bytes(self) -> float:
        """The whole model in bf16."""
        return self.parameters * BF16

    def kv_bytes_per_token(self, tp: int = 1) -> float:
        """On one of `tp` accelerators. KV heads are replicated where tp exceeds their number."""
        return 2.0 * self.layers * math.ceil(self.kv_heads / tp) * self.head_dim * BF16

    def touched_share(self, tokens: float) -> float:
        """Share of the experts that a batch of tokens reaches, routed evenly: 1 - (1 - k/E)^tokens; 0 if dense."""
        return 1.0 - (1.0 - self.experts_per_token / self.experts) ** tokens if self.experts else 0.0


@dataclass(frozen=True, slots=True)
class DecodeConstants:
    """Of one decoding step; `steptimes.decode_terms` says what each multiplies."""

    dense_read: float
    """Reading the weights that every token passes, over HBM bandwidth; at least 1."""
    expert_read: float
    """Reading the experts that the batch touches, over HBM bandwidth; at least 1."""
    kv_read: float
    """Reading the KV cache, over HBM bandwidth; at least 1."""
    arithmetic: float
    """What of the arithmetic is not hidden behind the reading; may be below 1."""
    layer_s: float
    """Seconds per layer whatever the batch: launches, norms."""
    moe_layer_s: float
    """Further seconds per layer with experts: routing and permutation."""
    dispatch_s: float
    """Seconds per layer, token and expert it is sent to."""
    collective_s: float
    """Seconds per layer where tp > 1: latency of its two all-reduces."""
    collective_bytes: float
    """All-reduce traffic over NVLink bandwidth; at least 1."""


@dataclass(frozen=True, slots=True)
class PrefillConstants:
    """Of computing the KV cache of new tokens; `steptimes.prefill_terms` says what each multiplies."""

    dense_arithmetic: float
    """Over the dense peak; at least 1."""
    expert_arithmetic: float
    """Over the dense peak; at least 1."""
    attention: float
    """The quadratic part, over the dense peak; at least 1."""
    weight_read: float
    """Reading the weights once, over HBM bandwidth; at least 1."""
    elementwise: float
    """Passes over the hidden state per layer (norms, residuals, activations), over HBM bandwidth."""
    dispatch: float
    """Passes over the hidden state per layer and expert that a token is sent to, over HBM bandwidth."""
    layer_s: float
    collective_s: float
    collective_bytes: float
    """As in DecodeConstants."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What of a device's memory an engine or trainer may use."""

    fraction: float
    """Share of the device's memory in all."""
    reserved_bytes: float
    """Runtime context, graphs, collective buffers."""
    batched_tokens: int
    """Most tokens in one engine step, whose activations are set aside."""


@dataclass(frozen=True, slots=True)
class WeightSync:
    """Seconds = base + bytes / gather + bytes / broadcast + per_doubling * log2(nodes of engines)."""

    base_s: float
    gather_bytes_s: float
    """From the trainers' shards to whole tensors."""
    broadcast_bytes_s: float
    """From there to all engines."""
    per_doubling_s: float


@dataclass(frozen=True, slots=True)
class HostCopy:
    """Seconds = base + max(bytes of one device / (PCIe * efficiency), bytes of all / host)."""

    base_s: float
    pcie_efficiency: float
    host_bytes_s: float
    """What one host copies in all, over all its devices."""


@dataclass(frozen=True, slots=True)
class ColdStart:
    """Seconds = base + weight bytes / load: process, compilation, graphs, and reading the weights."""

    base_s: float
    load_bytes_s: float


@dataclass(frozen=True, slots=True)
class KvMove:
    """Seconds = latency + bytes / (link * efficiency), over one link."""

    latency_s: float
    link_efficiency: float


@dataclass(frozen=True, slots=True)
class Training:
    """How a training step uses the devices."""

    mfu_dense: float
    """Model FLOP/s over the dense peak; recomputed activations are not counted as work."""
    mfu_moe: float
    state_bytes_per_parameter: float
    """Weights, gradients, master weights and the two Adam moments, sharded over a replica."""
    gradient_bytes: float
    """Bytes per parameter in a reduction."""
    link_efficiency: float
    micro_batch_tokens: int
    """Token budget of a micro-batch; a longer sequence is one of its own."""
    pipeline_stages: int = 1


@dataclass(frozen=True, slots=True)
class Operations:
    """What depends on the serving and training software more than on the accelerator's type."""

    memory: Memory
    weight_sync: WeightSync
    host_copy: HostCopy
    cold_start: ColdStart
    kv_move: KvMove
    training: Training
    sources: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Extra:
    """What a cluster has on top of the table's model; 0 changes nothing."""

    collective_bytes_s: float = 0.0
    """Rate of all-reduces, in the place of NVLink over `collective_bytes`."""
    tp_step_s: float = 0.0
    """Further seconds of each engine step where tp > 1."""
    memory_fraction: float = 0.0
    """In the place of `Memory.fraction` for engines."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """Everything about a kind of machine that times are computed from."""

    accelerator: AcceleratorType
    node: NodeTopology
    decode: DecodeConstants
    prefill: PrefillConstants
    operations: Operations
    extra: Extra = field(default_factory=Extra)

    @property
    def engine_bytes(self) -> float:
        """Memory of one accelerator that an engine may fill."""
        return (self.extra.memory_fraction or self.operations.memory.fraction) * self.accelerator.hbm_bytes
