"""The k-th smallest over ranges, against writing the ranges out."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tailrace.measure.wavelet import WaveletMatrix


@given(st.lists(st.integers(0, 40), min_size=1, max_size=30), st.data())
def test_every_rank_of_ranges_equals_the_ranges_written_out(numbers: list[int], data: st.DataObject) -> None:
    matrix = WaveletMatrix(np.array(numbers, np.int64))
    place = st.integers(0, len(numbers))
    ranges = data.draw(st.lists(st.tuples(place, place).map(sorted), min_size=1, max_size=5))
    low, high = np.array(ranges, np.int64).T
    expected = sorted(number for a, b in ranges for number in numbers[a:b])
    # One group a rank, each of all the ranges.
    group = np.repeat(np.arange(len(expected)), len(ranges))
    every = (np.tile(low, len(expected)), np.tile(high, len(expected)))
    assert matrix.smallest(group, *every, np.arange(len(expected))).tolist() == expected
