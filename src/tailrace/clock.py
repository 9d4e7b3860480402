"""Monotonic time and named random streams. Pure code takes `now_ns` as an argument; only shells call in here."""

import time
import zlib

import numpy as np

NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000

monotonic_ns = time.monotonic_ns


class VirtualClock:
    """Time as a number that only `advance` moves: tests and the simulator."""

    def __init__(self, now_ns: int = 0) -> None:
        self.now_ns = now_ns

    def advance(self, duration_ns: int) -> int:
        assert duration_ns >= 0, "time does not run backwards"
        self.now_ns += duration_ns
        return self.now_ns


def random_stream(seed: int, name: str) -> np.random.Generator:
    """A generator that depends on its seed and its name only, so adding a stream never shifts another."""
    # An explicit dtype: a plain list above 2**63 would pass through float64 and merge neighbouring seeds.
    key = np.array([seed & 0xFFFFFFFFFFFFFFFF, zlib.crc32(name.encode())], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key))
