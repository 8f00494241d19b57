"""Reads Hugging Face models for the reference engine, and compares them."""

import importlib
from typing import Any

from services.common import errors
from services.rollout.engine.base import Codec, Weights


def preload() -> None:
    """Imports what a warm worker needs, without a model; seconds that a hand-over need not wait for."""
    importlib.import_module("torch")
    importlib.import_module("transformers.models.qwen3.modeling_qwen3")


def build(weights: Weights) -> tuple[Any, Codec]:
    """A model in float32 that attends through the slot cache, and its tokenizer. INVALID_FIELD if it cannot be read.

    With shards only the architecture is read, and the weights are left as they were initialised.
    """
    import torch
    from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    from services.rollout.engine import attention
    from services.rollout.engine.tokenizer import load_codec

    logging.disable_progress_bar()
    AttentionInterface.register(attention.NAME, attention.attend)
    options = {"dtype": torch.float32, "attn_implementation": attention.NAME}
    try:
        if weights.shards:
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(weights.model), **options)
        else:
            model = AutoModelForCausalLM.from_pretrained(weights.model, **options)
        codec = load_codec(weights.model)
    except (OSError, ValueError) as error:
        raise errors.invalid_field(f"the model {weights.model!r} cannot be read: {error}"[:1024]) from error
    model.requires_grad_(requires_grad=False)
    return model.eval(), codec


def same_shape(one: Any, other: Any) -> bool:
    """True if a cache made for one fits the other."""
    a, b = one.state_dict(), other.state_dict()
    return (
        a.keys() == b.keys()
        and all(a[k].shape == b[k].shape for k in a)
        and one.config.max_position_embeddings == other.config.max_position_embeddings
    )


def check_state(model: Any, state: dict[str, Any]) -> None:
    """INVALID_FIELD unless the tensors are exactly the model's; tied weights may be named once."""
    own = model.state_dict()
    needed = {name for name, _ in model.named_parameters()}
    missing, unknown = sorted(needed - state.keys()), sorted(state.keys() - own.keys())
    wrong = [k for k, v in state.items() if k in own and v.shape != own[k].shape]
    if missing or unknown or wrong:
        raise errors.invalid_field(
            f"the weights do not fit the model: missing {missing[:3]}, unknown {unknown[:3]}, "
            f"of other shape {wrong[:3]}"
        )
