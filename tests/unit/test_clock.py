"""Virtual time and named random streams."""

import numpy as np
import pytest

from tailrace.clock import VirtualClock, random_stream


def test_virtual_time_moves_only_by_advance() -> None:
    clock = VirtualClock(5)
    assert clock.advance(7) == 12
    assert clock.now_ns == 12


def test_time_does_not_run_backwards() -> None:
    with pytest.raises(AssertionError, match="backwards"):
        VirtualClock().advance(-1)


def test_a_stream_depends_on_seed_and_name_only() -> None:
    first = random_stream(1, "arrivals").integers(0, 1 << 60, 8)
    random_stream(1, "another").integers(0, 1 << 60, 100)
    assert np.array_equal(first, random_stream(1, "arrivals").integers(0, 1 << 60, 8))
    assert not np.array_equal(first, random_stream(1, "lengths").integers(0, 1 << 60, 8))
    assert not np.array_equal(first, random_stream(2, "arrivals").integers(0, 1 << 60, 8))


@pytest.mark.parametrize("seed", [-1, 2**64, 2**70])
def test_any_integer_is_a_seed(seed: int) -> None:
    assert 0.0 <= random_stream(seed, "x").random() < 1.0


def test_neighbouring_large_seeds_differ() -> None:
    assert random_stream(2**64 - 1, "x").random() != random_stream(2**64 - 2, "x").random()
