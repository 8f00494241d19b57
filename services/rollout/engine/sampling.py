"""From logits and uniforms to tokens and their logprobs, all rows at once, in float64.

A token is drawn by inverting the cumulative distribution in the order of token ids, so that the choice depends on the
uniform and the distribution alone. Its logprob is that of the distribution it was drawn from (after temperature, top-k
and top-p: LOGPROB_KIND_SAMPLED). Greedy rows (temperature 0) take the largest logit; their logprob is that of the
untouched distribution (LOGPROB_KIND_RAW), since under the sharpened one it would be 0 always.
"""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def sample(
    logits: npt.NDArray[np.float32],
    uniforms: Floats,
    temperature: Floats,
    top_p: Floats,
    top_k: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.int64], Floats]:
    """Ids [n] and logprobs [n] from logits [n, vocabulary] and one value per row of the others.

    temperature >= 0 (0 is greedy), top_p in (0, 1] (1 keeps all), top_k >= 0 (0 keeps all).
    """
    rows = np.arange(len(logits))
    greedy = temperature <= 0.0
    scaled = logits.astype(np.float64)
    if not (greedy | (temperature == 1.0)).all():
        scaled /= np.where(greedy, 1.0, temperature)[:, None]
    scaled -= scaled.max(axis=1, keepdims=True)
    truncated = ~greedy & ((top_p < 1.0) | (top_k > 0))
    if truncated.any():
        scaled[truncated] = _truncate(scaled[truncated], top_p[truncated], top_k[truncated])
    cumulative = np.exp(scaled).cumsum(axis=1)
    total = cumulative[:, -1]
    # count of ids whose cumulative mass does not exceed the target = the drawn id; ids without mass are never drawn
    ids = (cumulative <= (uniforms * total)[:, None]).sum(axis=1)
    if (ids >= logits.shape[1]).any():  # u * total may round up to total
        last = logits.shape[1] - 1 - (scaled > -np.inf)[:, ::-1].argmax(axis=1)
        ids = np.minimum(ids, last)
    if greedy.any():
        ids = np.where(greedy, scaled.argmax(axis=1), ids)
    return ids, scaled[rows, ids] - np.log(total)


def _truncate(scaled: Floats, top_p: Floats, top_k: npt.NDArray[np.int64]) -> Floats:
    """Sets all but the candidates to -inf: the top_k largest, then the smallest set of them that holds top_p."""
    order = np.argsort(-scaled, axis=1, kind="stable")
    ordered = np.take_along_axis(scaled, order, axis=1)
    ranks = np.arange(scaled.shape[1])[None, :]
    keep = ranks < np.where(top_k > 0, top_k, scaled.shape[1])[:, None]
    mass = np.where(keep, np.exp(ordered), 0.0)
    before = mass.cumsum(axis=1) - mass
    keep &= (before < top_p[:, None] * mass.sum(axis=1, keepdims=True)) | (ranks == 0)
    out = np.full_like(scaled, -np.inf)
    np.put_along_axis(out, order, np.where(keep, ordered, -np.inf), axis=1)
    return out
