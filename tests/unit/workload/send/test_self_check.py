"""What the client says of itself."""

import asyncio
import gc
import itertools
import time
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tailrace.workload.send.alarm import Alarm
from tailrace.workload.send.self_check import TICK_NS, GcWatch, LoopTicker, StealWatch, lag, thinned


def test_alarms_fire_in_order_and_never_early() -> None:
    async def run() -> list[tuple[int, int]]:
        loop = asyncio.get_running_loop()
        alarm = Alarm(loop)
        fired: list[tuple[int, int]] = []
        done = loop.create_future()
        now_ns = time.monotonic_ns()
        for number, offset_ns in enumerate((3_000_000, 1_000_000, -5, 1_000_000)):
            at_ns = now_ns + offset_ns
            alarm.at(at_ns, lambda number=number, at_ns=at_ns: fired.append((number, time.monotonic_ns() - at_ns)))  # type: ignore[misc]
        alarm.at(now_ns + 3_000_001, lambda: done.set_result(None))
        await done
        alarm.close()
        return fired

    fired = asyncio.run(run())
    assert [number for number, _ in fired] == [2, 1, 3, 0]
    assert all(late_ns >= 0 for _, late_ns in fired)


def test_a_closed_alarm_fires_no_more() -> None:
    async def run() -> list[int]:
        alarm = Alarm(asyncio.get_running_loop())
        fired: list[int] = []
        alarm.at(0, lambda: fired.append(1))
        alarm.close()
        await asyncio.sleep(0)
        return fired

    assert asyncio.run(run()) == []


def test_a_blocked_loop_counts_once_for_each_tick_that_was_due() -> None:
    async def run() -> list[int]:
        alarm = Alarm(asyncio.get_running_loop())
        ticker = LoopTicker(alarm)
        ticker.start(time.monotonic_ns() - 10 * TICK_NS)  # As if it had been blocked since.
        while len(ticker.lateness_ns) < 11:
            await asyncio.sleep(0)
        alarm.close()
        return list(ticker.lateness_ns)

    late = asyncio.run(run())[:11]
    assert all(before - after == TICK_NS for before, after in itertools.pairwise(late))


def test_collections_are_timed_while_watched() -> None:
    watch = GcWatch()
    watch.start()
    gc.collect(0)
    watch.stop()
    before = len(watch.pauses_ns)
    gc.collect(0)
    assert before == len(watch.pauses_ns) >= 1
    assert gc.get_freeze_count() == 0


@given(st.lists(st.integers(0, 10**9), max_size=300), st.integers(2, 50))
def test_thinned_values_keep_their_ends_and_their_order(values: list[int], num_max: int) -> None:
    kept = thinned(values, num_max)
    assert len(kept) == min(len(values), num_max)
    assert kept == sorted(kept)
    if values:
        assert (kept[0], kept[-1]) == (min(values), max(values))
        assert set(kept) <= set(values)


def test_lag_is_nearest_rank() -> None:
    found = lag([i * 1_000_000 for i in range(1, 101)])
    assert (found.p50_ms, found.p99_ms, found.max_ms) == (50.0, 99.0, 100.0)
    assert lag([]).max_ms == 0.0


def test_time_taken_by_the_host_is_a_share_of_all_processors(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 0 50 800 0 0 0 50 7 0\ncpu0 ...\n")
    watch = StealWatch(stat)
    assert watch.ratio is None, "no time has passed"
    stat.write_text("cpu  150 0 50 840 0 0 0 60 9 0\ncpu0 ...\n")
    assert watch.ratio == 10 / 100


def test_a_host_that_does_not_tell_what_it_takes_is_no_fault(tmp_path: Path) -> None:
    assert StealWatch(tmp_path / "none").ratio is None
    (tmp_path / "odd").write_text("cpu many\n")
    assert StealWatch(tmp_path / "odd").ratio is None
