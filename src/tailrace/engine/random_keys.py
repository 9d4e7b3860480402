"""Counter-based random numbers: a draw is a function of its key (seed, choice, position, purpose) and of nothing else.

So a sequence draws the same tokens alone, in a batch, after a preemption and on another machine. The function is the
finaliser of splitmix64 (Steele, Lea, Flood 2014, with Stafford's variant 13), applied once for each word of the key.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

PURPOSE_TOKEN = 0
"""The token itself. Other uses of randomness at the same position (speculation) take other numbers."""

_MASK = 0xFFFFFFFFFFFFFFFF
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_STEPS = ((np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)), (np.uint64(27), np.uint64(0x94D049BB133111EB)))
_LAST_SHIFT = np.uint64(31)
_TO_UNIT = 2.0**-53


def uniforms(
    seeds: Sequence[int], choices: Sequence[int], positions: Sequence[int], purpose: int
) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each key, 53 bits of it random. Seeds are taken modulo 2**64."""
    state = _mix(np.array([seed & _MASK for seed in seeds], dtype=np.uint64) + _GOLDEN)
    for words in (choices, positions, [purpose] * len(seeds)):
        # A bijection of the word for a fixed state: keys that differ in one word never collide.
        state = _mix(state + _GOLDEN * (np.array(words, dtype=np.uint64) + np.uint64(1)))
    return (state >> np.uint64(11)).astype(np.float64) * _TO_UNIT


def _mix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    for shift, factor in _STEPS:
        state = (state ^ (state >> shift)) * factor
    return state ^ (state >> _LAST_SHIFT)
