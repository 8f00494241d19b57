"""Times of moving a model's weights: between trainers and engines, and between devices and their host."""

import math

from services.simulator.hardware import Hardware


def weight_sync_s(hardware: Hardware, weight_bytes: float, rollout_accelerators: int, *, gathered: bool) -> float:
    """Weights to all engines. `gathered`: from the trainers' shards first; False where one copy lies ready."""
    sync = hardware.operations.weight_sync
    nodes = max(1, math.ceil(rollout_accelerators / hardware.node.accelerators))
    gather = weight_bytes / sync.gather_bytes_s if gathered else 0.0
    return sync.base_s + gather + weight_bytes / sync.broadcast_bytes_s + sync.per_doubling_s * math.log2(nodes)


def host_copy_s(hardware: Hardware, total_bytes: float, accelerators: int) -> float:
    """`total_bytes` spread evenly over so many devices, to their hosts' memory or back; hosts work side by side."""
    copy = hardware.operations.host_copy
    hosts = max(1.0, accelerators / hardware.node.accelerators)
    link = hardware.accelerator.pcie_bytes_s * copy.pcie_efficiency
    return copy.base_s + max(total_bytes / accelerators / link, total_bytes / hosts / copy.host_bytes_s)
