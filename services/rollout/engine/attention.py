"""Attention over the slot cache, plugged into Hugging Face models by name; one forward pass for decode and prefill.

The usual form keeps a Cache object, pads all rows to one length and builds 4-d masks. Here the tokens of a step lie in
one flat row [1, N]: first one token for each decoding sequence, then the newcomers' prompts one after the other. All
linear layers see no padding; only this function knows where a token belongs (`Step`). Keys and values are written to
their slots first, then read back through a slice of the cache.
"""

from dataclasses import dataclass
from typing import Any

import torch

NAME = "libra_slots"
"""Name under which the function is registered with transformers."""


@dataclass(slots=True)
class Span:
    """Sequences that attend together: `lengths[i]` tokens each, at cache rows `rows`."""

    rows: slice | torch.Tensor
    """Rows of the cache, a slice where they are neighbours (no copy), else an index [B]."""
    size: int
    """Number of sequences B."""
    width: int
    """Longest piece T; 1 for decoding."""
    context: int
    """Cache positions looked at: the longest position + 1."""
    mask: torch.Tensor
    """[B, 1, T, context], 0 where visible, -inf elsewhere."""
    first: int
    """Where its tokens begin in the flat row."""
    tokens: int
    """Tokens in the flat row, without padding."""
    padded: torch.Tensor | None
    """Where each flat token stands in [B * T]; None if there is no padding."""


@dataclass(slots=True)
class Step:
    """One forward pass: the cache, where the flat tokens' keys go, and who attends to what."""

    cache: torch.Tensor
    """[2, layers, slots, kv heads, positions, head size]."""
    write: torch.Tensor
    """[N * kv heads]: row of the cache viewed as [slots * kv heads * positions, head size]."""
    spans: list[Span]


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    slot_step: Step,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function: query [1, heads, N, D], key and value [1, kv heads, N, D] -> [1, N, heads, D]."""
    del attention_mask
    layer: int = module.layer_idx  # type: ignore[assignment]
    heads, size = query.shape[1], query.shape[3]
    kv_heads = key.shape[1]
    keys, values = slot_step.cache[0, layer], slot_step.cache[1, layer]
    # [N, kv heads, D] -> rows of the cache
    keys.view(-1, size).index_copy_(0, slot_step.write, key[0].transpose(0, 1).reshape(-1, size))
    values.view(-1, size).index_copy_(0, slot_step.write, value[0].transpose(0, 1).reshape(-1, size))
    flat = query[0].transpose(0, 1)  # [N, heads, D]
    parts = [
        _attend_span(span, flat[span.first : span.first + span.tokens], keys, values, heads, kv_heads, scaling)
        for span in slot_step.spans
    ]
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out.unsqueeze(0), None


def _attend_span(
    span: Span,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    heads: int,
    kv_heads: int,
    scaling: float,
) -> torch.Tensor:
    """[tokens, heads, D] -> [tokens, heads, D]."""
    size, group = query.shape[2], heads // kv_heads
    batch = span.size * kv_heads
    k = keys[span.rows][:, :, : span.context].reshape(batch, span.context, size)
    v = values[span.rows][:, :, : span.context].reshape(batch, span.context, size)
    if span.width == 1:
        q = query.reshape(batch, group, size)
        scores = torch.baddbmm(_mask(span, kv_heads, group), q, k.transpose(1, 2), alpha=scaling)
        return torch.bmm(scores.softmax(-1), v).view(span.size, heads, size)
    if span.padded is None:
        full = query.reshape(span.size * span.width, heads, size)
    else:
        full = query.new_zeros(span.size * span.width, heads, size)
        full.index_copy_(0, span.padded, query)
    # [B, T, kv, group, D] -> [B * kv, group * T, D]
    q = full.view(span.size, span.width, kv_heads, group, size).permute(0, 2, 3, 1, 4)
    q = q.reshape(batch, group * span.width, size)
    scores = torch.baddbmm(_mask(span, kv_heads, group), q, k.transpose(1, 2), alpha=scaling)
    out = torch.bmm(scores.softmax(-1), v).view(span.size, kv_heads, group, span.width, size)
    out = out.permute(0, 3, 1, 2, 4).reshape(span.size * span.width, heads, size)
    return out if span.padded is None else out.index_select(0, span.padded)


def _mask(span: Span, kv_heads: int, group: int) -> torch.Tensor:
    """[B * kv, group * T, context] from [B, 1, T, context]; made once a step, since all layers share it."""
    if span.mask.dim() == 4:
        wide = span.mask.unsqueeze(2).expand(span.size, kv_heads, group, span.width, span.context)
        span.mask = wide.reshape(span.size * kv_heads, group * span.width, span.context)
    return span.mask
