"""Draws and sampling: pure functions of key and position, exact inverse CDF."""

import numpy as np

from services.rollout.draws import draw_state, uniforms
from services.rollout.engine.sampling import sample


def _splitmix(state: int, count: int) -> list[int]:
    """The published reference generator, one output after the other."""
    mask, out = (1 << 64) - 1, []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        out.append(z ^ (z >> 31))
    return out


def test_positions_are_the_outputs_of_splitmix64():
    state = draw_state(1, 2, 3, 4)
    got = uniforms(np.full(50, state, np.uint64), np.arange(50))
    assert got.tolist() == [(x >> 11) * 2.0**-53 for x in _splitmix(state, 50)]


def test_reference_values_stay_what_they_are():
    # a change here would make moved episodes draw something else than those that ran before it
    assert _splitmix(0, 2) == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]
    assert draw_state(7, 5, 2, 0) == draw_state(7, 5, 2, 0)
    assert len({draw_state(a, b, c, d) for a in range(4) for b in range(4) for c in range(4) for d in range(4)}) == 256


def test_uniforms_are_uniform_and_unrelated_between_neighbours():
    states = np.array([draw_state(1, g, s, 0) for g in range(40) for s in range(8)], np.uint64)
    table = np.stack([uniforms(states, np.full(len(states), p)) for p in range(64)])
    assert abs(table.mean() - 0.5) < 0.01
    assert abs(table.var() - 1 / 12) < 0.005
    assert np.abs(np.corrcoef(table[:-1].ravel(), table[1:].ravel())[0, 1]) < 0.03
    assert np.abs(np.corrcoef(table[:, :-1].ravel(), table[:, 1:].ravel())[0, 1]) < 0.03


def _sample(logits, u, temperature=1.0, top_p=1.0, top_k=0):
    n = len(u)
    rows = np.tile(np.asarray(logits, np.float32), (n, 1))
    return sample(rows, np.asarray(u, float), np.full(n, temperature), np.full(n, top_p), np.full(n, top_k, np.int64))


def test_inverse_cdf_in_id_order():
    p = np.array([0.1, 0.2, 0.3, 0.4])
    ids, logprobs = _sample(np.log(p), [0.0, 0.0999, 0.1001, 0.2999, 0.3001, 0.5999, 0.6001, 1 - 2**-53])
    assert ids.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert np.allclose(logprobs, np.log(p)[ids], atol=1e-6)


def test_temperature_changes_the_distribution_and_its_logprob():
    logits = np.array([0.0, 1.0, 2.0])
    u = np.linspace(0, 1, 20001)[:-1]
    ids, logprobs = _sample(logits, u, temperature=0.5)
    expected = np.exp(logits / 0.5) / np.exp(logits / 0.5).sum()
    assert np.allclose(np.bincount(ids) / len(u), expected, atol=1e-3)
    assert np.allclose(logprobs, np.log(expected)[ids], atol=1e-6)


def test_greedy_takes_the_largest_and_gives_the_untouched_logprob():
    logits = np.array([0.0, 3.0, 2.0])
    ids, logprobs = _sample(logits, [0.99], temperature=0.0)
    assert ids.tolist() == [1]
    assert np.allclose(logprobs, 3.0 - np.log(np.exp(logits).sum()))


def test_top_k_and_top_p_keep_the_candidates_and_renormalise():
    p = np.array([0.05, 0.5, 0.15, 0.3])
    u = np.linspace(0, 1, 1001)[:-1]
    ids, logprobs = _sample(np.log(p), u, top_k=2)
    assert set(ids.tolist()) == {1, 3}
    assert np.allclose(logprobs, np.log(p / 0.8)[ids], atol=1e-6)
    ids, _ = _sample(np.log(p), u, top_p=0.79)
    assert set(ids.tolist()) == {1, 3}
    ids, _ = _sample(np.log(p), u, top_p=0.81)
    assert set(ids.tolist()) == {1, 2, 3}
    ids, _ = _sample(np.log(p), u, top_p=1e-9)
    assert set(ids.tolist()) == {1}


def test_ids_without_mass_are_never_drawn():
    logits = np.array([-np.inf, 0.0, -np.inf, 0.0, -np.inf], np.float32)
    ids, logprobs = _sample(logits, [0.0, 0.5, 1 - 2**-53])
    assert ids.tolist() == [1, 3, 3]
    assert np.isfinite(logprobs).all()
