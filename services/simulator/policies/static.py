"""Static layouts with least-loaded routing: half and half without a thought, and what a bounded search finds."""

from services.common.errors import ConfigError
from services.simulator.layout import ClusterSpec, Layout
from services.simulator.policies.base import Policy


class StaticUniform(Policy):
    """Half of the accelerators train, half generate, each engine of the smallest degree that holds the model."""

    name = "static-uniform"

    def __init__(self, layout: Layout | None = None) -> None:
        self._given = layout

    def start(self, spec: ClusterSpec) -> Layout:
        """See `uniform`."""
        return self._given or uniform(spec)


class BestHomogeneous(Policy):
    """The best of `search.homogeneous_layouts` and their `search.neighbours`: static splits of one degree."""

    name = "best-homogeneous"


class BestStatic(Policy):
    """The best of `search.mixed_layouts`: around the best split of one degree, mixes of two."""

    name = "best-static"


def uniform(spec: ClusterSpec) -> Layout:
    """Half and half, the training half rounded to whole replicas; all rollout where nothing trains."""
    tp = min(degrees(spec))
    training = 0
    if spec.training is not None:
        least = spec.training.min_accelerators()
        training = max(least, spec.accelerators // 2 // least * least)
    return Layout((tp,) * ((spec.accelerators - training) // tp), training)


def degrees(spec: ClusterSpec) -> list[int]:
    """Powers of two within a node for which an engine has a KV cache; at least one."""
    found = []
    tp = 1
    while tp <= min(spec.node_size, spec.accelerators):
        if _kv_tokens(spec, tp) >= spec.min_kv_tokens:
            found.append(tp)
        tp *= 2
    return found or [min(spec.node_size, spec.accelerators)]


def _kv_tokens(spec: ClusterSpec, tp: int) -> int:
    """0 where the model does not fit."""
    try:
        return spec.times.kv_tokens(tp)
    except ConfigError:
        return 0
