"""The client looks at itself: lateness of its loop, pauses of its garbage collector, its share of a processor."""

import gc
import os
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tailrace.clock import NS_PER_MS, monotonic_ns
from tailrace.measure.run_info import ClientStats, Lag, NullRun
from tailrace.workload.job import Finished
from tailrace.workload.send.alarm import Alarm

TICK_NS = 5 * NS_PER_MS
SAMPLES_MAX = 20_000
_TICKS_KEPT_MAX = 4_000_000
"""More than five hours; later ticks replace none and are left out."""


class LoopTicker:
    """Lateness of a tick every 5 ms. A blocked loop counts once for every tick that was due in it, so that lateness
    is weighted by time: one pause of 50 ms is ten late ticks, not one."""

    def __init__(self, alarm: Alarm) -> None:
        self._alarm = alarm
        self._due_ns = 0
        self.lateness_ns = array("q")

    def start(self, at_ns: int) -> None:
        self._due_ns = at_ns
        self._alarm.at(at_ns, self._tick)

    def _tick(self) -> None:
        now_ns = monotonic_ns()
        while self._due_ns <= now_ns:
            if len(self.lateness_ns) < _TICKS_KEPT_MAX:
                self.lateness_ns.append(now_ns - self._due_ns)
            self._due_ns += TICK_NS
        self._alarm.at(self._due_ns, self._tick)


class GcWatch:
    """Times every collection of this process from `start` to `stop`."""

    def __init__(self) -> None:
        self.pauses_ns = array("q")
        self._began_ns = 0

    def start(self) -> None:
        """What exists now is never looked at again. Later garbage in cycles is collected young and often, in pauses of
        well under a millisecond; a full collection, which takes as long as everything alive is large, does not come."""
        gc.collect()
        gc.freeze()
        gc.set_threshold(10_000, 50, 1_000_000)
        gc.callbacks.append(self._hear)

    def stop(self) -> None:
        gc.callbacks.remove(self._hear)
        gc.set_threshold(700, 10, 10)
        gc.unfreeze()

    def _hear(self, phase: str, info: dict[str, Any]) -> None:  # noqa: ARG002
        if phase == "start":
            self._began_ns = monotonic_ns()
        elif len(self.pauses_ns) < _TICKS_KEPT_MAX:
            self.pauses_ns.append(monotonic_ns() - self._began_ns)


class CpuWatch:
    """Processor time of this process over wall time, from construction on."""

    def __init__(self) -> None:
        self._wall_ns = monotonic_ns()
        self._cpu_ns = time.process_time_ns()

    @property
    def ratio(self) -> float:
        return (time.process_time_ns() - self._cpu_ns) / max(monotonic_ns() - self._wall_ns, 1)


class StealWatch:
    """Time that this virtual machine was ready to run and its host ran others, over wall time x processors."""

    def __init__(self, stat: Path = Path("/proc/stat")) -> None:
        self._stat = stat
        self._started = self._read()

    @property
    def ratio(self) -> float | None:
        """From construction on; None where the host does not tell."""
        now = self._read()
        if self._started is None or now is None or now[1] <= self._started[1]:
            return None
        return (now[0] - self._started[0]) / (now[1] - self._started[1])

    def _read(self) -> tuple[int, int] | None:
        """(stolen, all) in ticks: of the line `cpu` in proc(5), the eighth column and the sum of the first eight."""
        try:
            with self._stat.open(encoding="ascii") as file:
                ticks = [int(each) for each in file.readline().split()[1:9]]
        except (OSError, ValueError):
            return None
        return (ticks[7], sum(ticks)) if len(ticks) == 8 else None


def thinned(values_ns: Sequence[int], num_max: int = SAMPLES_MAX) -> list[int]:
    """Evenly by rank, smallest and largest kept: percentiles stay what they were, to 1 / `num_max`."""
    ranked = np.sort(np.asarray(values_ns, dtype=np.int64))
    if len(ranked) > num_max:
        ranked = ranked[np.linspace(0, len(ranked) - 1, num_max).round().astype(np.int64)]
    return [int(value) for value in ranked]


def lag(values_ns: Sequence[int]) -> Lag:
    """Nearest-rank percentiles, ms. No value: no lag was seen, and all are 0."""
    ranked = np.sort(np.asarray(values_ns, dtype=np.int64)) / NS_PER_MS
    if len(ranked) == 0:
        return Lag(p50_ms=0.0, p99_ms=0.0, max_ms=0.0)
    return Lag(p50_ms=_rank(ranked, 0.5), p99_ms=_rank(ranked, 0.99), max_ms=float(ranked[-1]))


def client_stats(finished: Sequence[Finished], null_run: NullRun | None = None) -> ClientStats:
    """Of all senders of a run; the worst of them where one value must stand for several."""
    assert finished, "a run has at least one sender"
    lags = [lag(each.loop_lag_ns) for each in finished]
    pauses = [pause for each in finished for pause in each.gc_pauses_ns]
    return ClientStats(
        num_senders=len(finished),
        loop_lag=max(lags, key=lambda each: each.p99_ms),
        gc_pause_ms_max=max(pauses, default=0) / NS_PER_MS,
        num_gc_pauses=len(pauses),
        cpu_ratio_max=max(each.cpu_ratio for each in finished),
        steal_ratio=max((each.steal_ratio for each in finished if each.steal_ratio is not None), default=None),
        num_connections_opened=sum(each.num_connections_opened for each in finished),
        num_connections_reused=sum(each.num_connections_reused for each in finished),
        num_connections_stale=sum(each.num_connections_stale for each in finished),
        num_own_limit=sum(each.num_own_limit for each in finished),
        num_in_flight_max=sum(each.num_in_flight_max for each in finished),
        num_cpus=len(os.sched_getaffinity(0)),
        governor=cpu_governor(),
        null_run=null_run,
    )


def cpu_governor() -> str | None:
    """Of the first processor; None where the host does not tell, as in most containers."""
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    return text.strip()[:40] or None


def _rank(ranked: Any, ratio: float) -> float:
    return float(ranked[max(int(np.ceil(ratio * len(ranked))) - 1, 0)])
