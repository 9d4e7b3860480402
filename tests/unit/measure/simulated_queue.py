"""A first-come queue with several servers, for runs whose truth is known."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def simulate(
    seed: int, num: int, *, servers: int, exponential: bool, load: float | tuple[float, float], warm: int = 0
) -> tuple[Floats, Floats, Floats, float]:
    """(scheduled_s, ended_s, ttft_ms, window_s). Mean service 1 s, Poisson arrivals at `load` of the capacity.

    `load` as a pair: the rate rises linearly from the first to the second. `warm` requests come before the window.
    """
    rng = np.random.default_rng(seed)
    arrivals = _ramp(rng, num, servers, load) if isinstance(load, tuple) else None
    if arrivals is None:
        arrivals = np.cumsum(rng.exponential(1 / (load * servers), num + warm))  # type: ignore[operator]
    service = rng.exponential(1, len(arrivals)) if exponential else np.ones(len(arrivals))
    free, started = np.zeros(servers), np.empty(len(arrivals))
    for i, at in enumerate(arrivals):
        server = int(free.argmin())
        started[i] = max(at, free[server])
        free[server] = started[i] + service[i]
    prefill = 0.1 + 0.1 * rng.random(len(arrivals))
    zero = arrivals[warm - 1] if warm else 0.0
    ttft_ms = (started + prefill - arrivals) * 1e3
    return arrivals - zero, started + service - zero, ttft_ms, float(arrivals[-1] - zero)


def _ramp(rng: np.random.Generator, num: int, servers: int, load: tuple[float, float]) -> Floats:
    """Instants of a Poisson process of `num` events whose rate rises linearly, by inverting its integral."""
    low, rise = load[0], (load[1] - load[0]) / 2
    window_s = num / ((load[0] + load[1]) / 2 * servers)
    drawn = np.sort(rng.random(num))
    return np.asarray(window_s * (-low + np.sqrt(low * low + 4 * rise * drawn * (low + rise))) / (2 * rise))
