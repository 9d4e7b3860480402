"""The k-th smallest number of any set of ranges of a sequence, in as many steps as its numbers have bits.

What a bootstrap over blocks of time asks thousands of times: a step costs by the number of blocks, not of samples. The
structure is the wavelet matrix of Claude, Navarro and Ordonez (2015): bit by bit from the highest, the sequence is put
in order of that bit, zeros first and otherwise as before, so that a range stays a range on either side.
"""

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class WaveletMatrix:
    def __init__(self, numbers: Ints) -> None:
        """`numbers` [n], none negative."""
        self._zeros: list[Ints] = []
        """By bit, highest first: [n + 1] how many of the first i numbers, in the order of that step, have a 0 there."""
        for bit in reversed(range(int(numbers.max(initial=0)).bit_length())):
            is_one = (numbers >> bit & 1).astype(np.bool_)
            self._zeros.append(np.concatenate((np.zeros(1, np.int64), np.cumsum(~is_one))))
            numbers = np.concatenate((numbers[~is_one], numbers[is_one]))

    def smallest(self, group: Ints, low: Ints, high: Ints, rank: Ints) -> Ints:
        """[groups] the number at `rank` (from 0) among those in all ranges [low, high) of each group.

        `group`, `low` and `high` have one entry a range; `rank` has one a group, and means nothing in an empty one.
        """
        rank = rank.copy()
        found = np.zeros_like(rank)
        for zeros in self._zeros:
            zeros_low, zeros_high = zeros[low], zeros[high]
            num_zeros = np.bincount(group, zeros_high - zeros_low, len(rank)).astype(np.int64)
            is_one = rank >= num_zeros
            rank -= np.where(is_one, num_zeros, 0)
            found = found * 2 + is_one
            goes_on = is_one[group]
            low = np.where(goes_on, zeros[-1] + low - zeros_low, zeros_low)
            high = np.where(goes_on, zeros[-1] + high - zeros_high, zeros_high)
        return found
