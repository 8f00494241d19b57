"""Time of a training step: model FLOPs over what the devices reach, and the traffic that is not hidden behind them.

Forward and backward take 6 operations per parameter and token, the proximal log-probabilities 2 more; causal attention
takes 2 * layers * heads * head_dim operations per squared token in each of those four passes (Kaplan et al.,
arXiv 2001.08361; Narayanan et al., arXiv 2104.04473). MFU counts that work alone; recomputed activations make it lower.
A replica is sharded like FSDP2: each micro-batch gathers the weights twice and scatters the gradients once, hidden
behind the arithmetic where that is longer. Pipeline stages idle for (stages - 1) / micro-batches of the work (GPipe,
arXiv 1811.06965). Replicas reduce their gradients in a ring over the network, one share of them on each device.
"""

from collections.abc import Iterable, Sequence

from services.common import packing
from services.common.errors import ConfigError
from services.simulator.hardware import BF16, Hardware, ModelShape
from services.simulator.steptimes import activation_bytes
from services.simulator.times import TrainingTimes
from services.simulator.transfers import host_copy_s

PASSES = 4
"""Forward passes that a trained token is worth: log-probabilities 1, forward 1, backward 2."""
UPDATE_TRAFFIC = 2
"""The optimizer reads its state and writes it back."""
CANDIDATES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1_024)
"""Sizes of a replica that are tried."""


class ModelledTraining(TrainingTimes):
    """TrainingTimes of one policy on one kind of machine."""

    def __init__(self, hardware: Hardware, model: ModelShape) -> None:
        self.hardware = hardware
        self.model = model
        looked_up = 0.0 if model.tied_embeddings else model.embedding_parameters
        self._linear = 2.0 * PASSES * (model.active_parameters - looked_up)
        self._quadratic = 2.0 * PASSES * model.layers * model.heads * model.head_dim

    def step_s(self, replicas: int, accelerators_each: int, sequence_tokens: list[int]) -> float:
        """See TrainingTimes. ConfigError without replicas or with fewer accelerators than one replica needs."""
        needed = self.min_accelerators()
        if replicas < 1 or accelerators_each < needed:
            raise ConfigError(
                f"{replicas} replicas of {accelerators_each} x {self.hardware.accelerator.name} cannot train "
                f"{self.model.name}: expected at least one replica of {needed}"
            )
        shards = packing.shards(sequence_tokens, replicas)
        work = max(self._shard_s([sequence_tokens[i] for i in shard], accelerators_each) for shard in shards)
        return work + self._reduce_s(replicas, accelerators_each) + self._update_s(accelerators_each)

    def min_accelerators(self) -> int:
        """See TrainingTimes; a power of two. ConfigError if 1,024 do not hold one."""
        memory = self.hardware.operations.memory
        usable = memory.fraction * self.hardware.accelerator.hbm_bytes - memory.reserved_bytes
        needed = self.state_bytes + self.activation_bytes(self.hardware.operations.training.micro_batch_tokens)
        for count in CANDIDATES:
            if needed / count <= usable:
                return count
        name = self.hardware.accelerator.name
        raise ConfigError(f"{self.model.name} cannot be trained on {name}: {CANDIDATES[-1]:,} of them are too few")

    @property
    def state_bytes(self) -> float:
        """Of one replica, over all its devices."""
        return self.hardware.operations.training.state_bytes_per_parameter * self.model.parameters

    def activation_bytes(self, tokens: int) -> float:
        """Of one micro-batch, over all devices of a replica: each layer's input, and one layer being recomputed."""
        kept = float(self.model.layers * self.model.hidden * BF16 * tokens)
        return kept + activation_bytes(self.model, tokens)

    def offload_s(self, replicas: int, accelerators_each: int) -> float:
        """See TrainingTimes. Replicas on one host share what it copies."""
        return host_copy_s(self.hardware, replicas * self.state_bytes, replicas * accelerators_each)

    def work_flops(self, sequence_tokens: Iterable[int]) -> float:
        """Operations of a step over these sequences."""
        return sum(self._linear * t + self._quadratic * t * t for t in sequence_tokens)

    def _shard_s(self, tokens: Sequence[int], accelerators: int) -> float:
        training, flops = self.hardware.operations.training, self.hardware.accelerator.flops
        mfu = training.mfu_moe if self.model.experts else training.mfu_dense
        micro_batches = max(1, len(packing.pack(tokens, training.micro_batch_tokens)))
        compute = self.work_flops(tokens) / (accelerators * flops * mfu)
        idle = 1.0 + (training.pipeline_stages - 1) / micro_batches
        return max(compute * idle, micro_batches * self._gather_s(accelerators))

    def _gather_s(self, accelerators: int) -> float:
        """Traffic of one micro-batch inside a replica: two gathers of the weights, one scatter of the gradients."""
        training = self.hardware.operations.training
        sent = (2 * BF16 + training.gradient_bytes) * self.model.parameters * (accelerators - 1) / accelerators
        return sent / (self._link(accelerators) * training.link_efficiency)

    def _reduce_s(self, replicas: int, accelerators: int) -> float:
        training = self.hardware.operations.training
        sent = 2.0 * (replicas - 1) / replicas * training.gradient_bytes * self.model.parameters / accelerators
        return sent / (self._link(replicas * accelerators) * training.link_efficiency)

    def _update_s(self, accelerators: int) -> float:
        return UPDATE_TRAFFIC * self.state_bytes / accelerators / self.hardware.accelerator.hbm_bytes_s

    def _link(self, accelerators: int) -> float:
        inside = accelerators <= self.hardware.node.accelerators
        return self.hardware.accelerator.nvlink_bytes_s if inside else self.hardware.node.network_bytes_s
