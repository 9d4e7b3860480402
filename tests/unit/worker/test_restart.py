from hypothesis import given
from hypothesis import strategies as st

from tailrace.clock import NS_PER_MS, NS_PER_S
from tailrace.worker.restart import RestartPolicy, restart_delay_ns

POLICY = RestartPolicy(backoff_ms_first=100, backoff_ms_max=1_000, failures_max=6, window_s=60)


def test_the_wait_doubles_up_to_its_bound_and_then_the_engine_stays_down() -> None:
    now_ns = 10 * NS_PER_S
    delays = [restart_delay_ns(POLICY, [now_ns] * n, now_ns) for n in range(1, 7)]
    assert delays == [100 * NS_PER_MS, 200 * NS_PER_MS, 400 * NS_PER_MS, 800 * NS_PER_MS, 1_000 * NS_PER_MS, None]


def test_deaths_outside_the_window_are_forgotten() -> None:
    now_ns = 1_000 * NS_PER_S
    assert restart_delay_ns(POLICY, [0] * 50 + [now_ns], now_ns) == 100 * NS_PER_MS


@given(st.lists(st.integers(0, 10**12), max_size=30), st.integers(0, 10**12))
def test_a_wait_is_never_longer_than_its_bound(failures_ns: list[int], now_ns: int) -> None:
    delay_ns = restart_delay_ns(POLICY, failures_ns, now_ns)
    assert delay_ns is None or 0 < delay_ns <= POLICY.backoff_ms_max * NS_PER_MS
