"""Draws as a pure function of (run seed, group, sample, sequence, position): a moved episode draws what it would have.

The naive form would be a generator with state per request; it dies with the request, and another engine would have to
replay every draw so far. Here token p's uniform is output number p of SplitMix64 (Steele, Lea, Flood 2014: "Fast
splittable pseudorandom number generators", finaliser by Stafford, variant 13) started at a state that is itself a
SplitMix64 hash of seed, group, sample and sequence:

    state   = mix(mix(mix(mix(0x6C696272 + seed) ^ group) ^ sample) ^ sequence)       (each input mixed as mix(x + G))
    uniform = mix(state + (p + 1) * G) >> 11, times 2**-53                             in [0, 1)

with G = 0x9E3779B97F4A7C15, all modulo 2**64. Vectorised over rows; no state is kept anywhere.
"""

import numpy as np
import numpy.typing as npt

GAMMA = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_M1, _M2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_DOMAIN = 0x6C696272


def draw_state(seed: int, group: int, sample: int, sequence: int) -> int:
    """The 64-bit state of one sequence's draws. Negative inputs count modulo 2**64."""
    state = _mix_int((_DOMAIN + seed) & _MASK)
    for part in (group, sample, sequence):
        state = _mix_int((state ^ _mix_int(part & _MASK)) & _MASK)
    return state


def uniforms(states: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """One uniform in [0, 1) for each (state, position); both of shape [n]."""
    with np.errstate(over="ignore"):
        x = states + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(GAMMA)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(_M1)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(_M2)
        x = x ^ (x >> np.uint64(31))
    unit: npt.NDArray[np.float64] = (x >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return unit


def _mix_int(x: int) -> int:
    x = (x + GAMMA) & _MASK
    x = ((x ^ (x >> 30)) * _M1) & _MASK
    x = ((x ^ (x >> 27)) * _M2) & _MASK
    return x ^ (x >> 31)
