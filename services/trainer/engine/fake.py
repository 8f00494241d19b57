"""An engine without a model: a short vector that moves by what it is fed. For tests of everything around it."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from services.trainer.algorithm import Grpo
from services.trainer.engine.base import Array, LossSums, TrainSequence

SIZE = 8


class FakeEngine:
    """Gradient: each trained token's advantage / divisor, added at position (id mod SIZE). Plain momentum step."""

    def __init__(self) -> None:
        self._grpo = Grpo()
        self._weights: npt.NDArray[np.float64] | None = None
        self._momentum = np.zeros(SIZE)
        self._gradient = np.zeros(SIZE)

    @property
    def loaded(self) -> bool:
        return self._weights is not None

    def load(self, model: Path, grpo: Grpo) -> None:
        del model
        self._grpo = grpo
        self._weights = np.zeros(SIZE)
        self._momentum = np.zeros(SIZE)
        self._gradient = np.zeros(SIZE)

    def zero(self) -> None:
        self._gradient[:] = 0

    def accumulate(self, batch: Sequence[TrainSequence], divisor: float) -> LossSums:
        sums = LossSums()
        for sequence in batch:
            np.add.at(self._gradient, sequence.ids[sequence.mask] % SIZE, sequence.advantage / divisor)
            sums.tokens += sequence.trained
            sums.policy_loss -= sequence.advantage * sequence.trained
        return sums

    def gradient(self) -> Array:
        return self._gradient

    def apply(self, gradient: Array, rate: float) -> float:
        assert self._weights is not None
        norm = float(np.linalg.norm(gradient.astype(np.float64)))
        self._momentum = 0.9 * self._momentum + gradient.astype(np.float64)
        self._weights = self._weights + rate * self._momentum
        self._gradient[:] = 0
        return norm

    def weights(self) -> dict[str, Array]:
        assert self._weights is not None
        return {"w": self._weights}

    def load_weights(self, weights: Mapping[str, Array]) -> None:
        self._weights = np.array(weights["w"], dtype=np.float64)

    def state(self) -> dict[str, Array]:
        assert self._weights is not None
        return {"w": self._weights.copy(), "momentum": self._momentum.copy()}

    def load_state(self, state: Mapping[str, Array]) -> None:
        self._weights = np.array(state["w"], dtype=np.float64)
        self._momentum = np.array(state["momentum"], dtype=np.float64)

    def free(self) -> None:
        self._weights = None
