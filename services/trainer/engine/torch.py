"""The torch engine: a Hugging Face causal language model, AdamW, gradients in one flat buffer."""

import ctypes
import gc
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from services.common import errors
from services.trainer.algorithm import Grpo
from services.trainer.engine.base import Array, LossSums, TrainSequence
from services.trainer.loss import LossRule, token_loss

DTYPES = {"float32": torch.float32, "float64": torch.float64}
FIRST_SEED = 0
"""Of torch's generator at version 0; from then on its state is part of checkpoints and of what joining replicas get."""


class TorchEngine:
    """Full-weight training on the CPU. Sums of gradients are kept in the model's number type, float32 or wider."""

    def __init__(self, dtype: str = "float32", threads: int = 1) -> None:
        torch.set_num_threads(threads)
        self._dtype = DTYPES[dtype]
        self._grpo = Grpo()
        self._model: Any = None
        self._reference: Any = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._names: list[str] = []
        self._parameters: list[torch.nn.Parameter] = []
        self._flat: torch.Tensor | None = None

    def warm_up(self) -> None:
        """Takes one step with a toy model and drops it.

        Libraries that load at first use (some seconds, a few hundred MB) are then part of the idle process, whose
        memory a release is measured against.
        """
        import transformers

        with torch.random.fork_rng():
            config = transformers.Qwen3Config(
                vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1,
                num_key_value_heads=1, head_dim=16, max_position_embeddings=16, attn_implementation="sdpa",
            )  # fmt: skip
            model = transformers.AutoModelForCausalLM.from_config(config)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        model(input_ids=torch.zeros((1, 4), dtype=torch.long)).logits.sum().backward()
        optimizer.step()
        del model, optimizer
        _trim()

    @property
    def loaded(self) -> bool:
        return self._model is not None

    def load(self, model: Path, grpo: Grpo) -> None:
        self.free()
        self._grpo = grpo
        self._model = self._read(model)
        self._model.train()
        if grpo.kl_coef:
            self._reference = self._read(model).eval()
            self._reference.requires_grad_(False)
        # version 0 is the same on every replica, generators included
        torch.manual_seed(FIRST_SEED)
        pairs = [(n, p) for n, p in self._model.named_parameters() if p.requires_grad]
        self._names, self._parameters = [n for n, _ in pairs], [p for _, p in pairs]
        # one buffer for all gradients, each parameter's .grad a view of it: the reduction is one operation, and an
        # empty shard is zeros without a special case
        self._flat = torch.zeros(sum(p.numel() for p in self._parameters), dtype=self._dtype)
        offset = 0
        for parameter in self._parameters:
            parameter.grad = self._flat[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()
        self._optimizer = torch.optim.AdamW(
            self._parameters,
            lr=grpo.learning_rate,
            betas=(grpo.beta1, grpo.beta2),
            weight_decay=grpo.weight_decay,
            foreach=False,
        )

    def _read(self, model: Path) -> Any:
        from transformers import AutoModelForCausalLM

        if not (model / "config.json").is_file():
            raise errors.invalid_field(
                f"model {model}: no config.json there; expected a folder in Hugging Face format", resource=str(model)
            )
        return AutoModelForCausalLM.from_pretrained(model, dtype=self._dtype, attn_implementation="sdpa")

    def zero(self) -> None:
        self._buffer().zero_()

    def _buffer(self) -> torch.Tensor:
        if self._flat is None:
            raise errors.engine_state("no model is resident; load one first")
        return self._flat

    def accumulate(self, batch: Sequence[TrainSequence], divisor: float) -> LossSums:
        if not any(s.trained for s in batch):
            return LossSums()
        logprob, entropy = self._logprobs(self._model, batch)
        behaviour = self._gather(batch, "behaviour")
        advantage = torch.cat([torch.full((s.trained,), s.advantage, dtype=self._dtype) for s in batch])
        reference = None
        if self._reference is not None:
            with torch.no_grad():
                reference, _ = self._logprobs(self._reference, batch)
        rule = LossRule(self._grpo.clip_low, self._grpo.clip_high, self._grpo.kl_coef, self._grpo.proximal)
        loss, sums = token_loss(logprob, behaviour, advantage, rule, reference)
        (loss / divisor).backward()  # type: ignore[no-untyped-call]
        sums.entropy = entropy
        return sums

    def _gather(self, batch: Sequence[TrainSequence], column: str) -> torch.Tensor:
        parts = [getattr(s, column)[s.mask] for s in batch]
        return torch.from_numpy(np.concatenate(parts)).to(self._dtype)

    def _logprobs(self, model: Any, batch: Sequence[TrainSequence]) -> tuple[torch.Tensor, float]:
        """Logprobs [trained tokens, sequence by sequence] at each sequence's temperature, and the sum of entropies.

        Sequences are padded on the right: under a causal mask no real token sees the padding. Logits are computed only
        at positions where some sequence of the batch has a trained token next.
        """
        length = max(s.tokens for s in batch)
        ids = torch.zeros((len(batch), length), dtype=torch.long)
        mask = torch.zeros((len(batch), length - 1), dtype=torch.bool)
        for row, sequence in enumerate(batch):
            ids[row, : sequence.tokens] = torch.from_numpy(sequence.ids)
            mask[row, : sequence.tokens - 1] = torch.from_numpy(sequence.mask[1:])
        keep = mask.any(0).nonzero().squeeze(1)
        logits = model(input_ids=ids[:, :-1], use_cache=False, logits_to_keep=keep).logits
        chosen = mask[:, keep]
        logits = logits[chosen] / self._gather(batch, "temperature")[:, None]
        targets = ids[:, 1:][mask]
        logs = torch.log_softmax(logits.to(self._dtype), dim=-1)
        with torch.no_grad():
            entropy = float(-(logs.exp() * logs).sum())
        return logs.gather(1, targets[:, None]).squeeze(1), entropy

    def gradient(self) -> Array:
        flat: Array = self._buffer().numpy()
        return flat

    def apply(self, gradient: Array, rate: float) -> float:
        buffer = self._buffer()
        assert self._optimizer is not None
        reduced = torch.from_numpy(gradient)
        if reduced.data_ptr() != buffer.data_ptr():
            buffer.copy_(reduced)
        norm = float(torch.linalg.vector_norm(buffer, dtype=torch.float64))
        limit = self._grpo.max_grad_norm
        if limit and norm > limit:
            buffer.mul_(limit / norm)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        buffer.zero_()
        return norm

    def weights(self) -> dict[str, Array]:
        with torch.no_grad():
            return {n: p.detach().numpy() for n, p in zip(self._names, self._parameters, strict=True)}

    def load_weights(self, weights: Mapping[str, Array]) -> None:
        _same_names(set(weights), set(self._names))
        with torch.no_grad():
            for name, parameter in zip(self._names, self._parameters, strict=True):
                parameter.copy_(_shaped(name, weights[name], tuple(parameter.shape)))

    def state(self) -> dict[str, Array]:
        assert self._optimizer is not None
        result: dict[str, Array] = {f"model.{n}": a.copy() for n, a in self.weights().items()}
        for name, parameter in zip(self._names, self._parameters, strict=True):
            for key, value in self._optimizer.state.get(parameter, {}).items():
                result[f"optimizer.{key}.{name}"] = value.detach().numpy().copy()
        result["rng"] = torch.get_rng_state().numpy().copy()
        return result

    def load_state(self, state: Mapping[str, Array]) -> None:
        assert self._optimizer is not None
        self.load_weights({n.removeprefix("model."): a for n, a in state.items() if n.startswith("model.")})
        by_name = dict(zip(self._names, self._parameters, strict=True))
        self._optimizer.state.clear()
        for key, value in state.items():
            if key.startswith("optimizer."):
                _, kind, name = key.split(".", 2)
                parameter = by_name[name]
                shape = () if kind == "step" else tuple(parameter.shape)
                tensor = _shaped(key, value, shape).clone()
                self._optimizer.state[parameter][kind] = tensor
        torch.set_rng_state(torch.from_numpy(np.array(state["rng"], dtype=np.uint8)))
        self.zero()

    def free(self) -> None:
        self._model = self._reference = self._optimizer = self._flat = None
        self._names, self._parameters = [], []
        _trim()


def _trim() -> None:
    gc.collect()
    if sys.platform == "linux":
        # the allocator keeps freed pages; the node agent measures what the system got back
        ctypes.CDLL(None).malloc_trim(0)


def _same_names(found: set[str], expected: set[str]) -> None:
    if found != expected:
        missing, extra = sorted(expected - found)[:3], sorted(found - expected)[:3]
        raise ValueError(f"the weights are of another model: missing {missing}, not expected {extra}")


def _shaped(name: str, value: Array, shape: tuple[int, ...]) -> torch.Tensor:
    if value.shape != shape:
        raise ValueError(f"{name} has shape {value.shape}, the model's is {shape}")
    return torch.from_numpy(np.array(value))
