"""Service level objectives as people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.errors import InvalidRequest
from tailrace.measure.slo import LIMITS_MAX, POOLED_METRICS, REQUEST_METRICS, Limit, parse_slo, percentile_name


def test_limits_are_read_in_the_order_written() -> None:
    slo = parse_slo(" ttft_ms_p99<=500, tpot_ms_p99.9 <= 60.5,itl_ms_p50<20 ")
    assert slo.limits == (
        Limit(metric="ttft_ms", percentile_ratio=0.99, limit_ms=500),
        Limit(metric="tpot_ms", percentile_ratio=0.999, limit_ms=60.5),
        Limit(metric="itl_ms", percentile_ratio=0.5, limit_ms=20),
    )


def test_no_text_is_no_limit() -> None:
    assert parse_slo("").limits == ()
    assert parse_slo(" , ").limits == ()


@pytest.mark.parametrize(
    "text",
    [
        "ttft_ms_p99=500",
        "ttft_p99<=500",
        "send_lag_ms_p99<=5",
        "ttft_ms_p0<=5",
        "ttft_ms_p99<=0",
        "ttft_ms_p99<=-5",
        "ttft_ms_p99<=nan",
        "ttft_ms_p100<=5",
        "ttft_ms_p99<=" + "9" * 400,
        "ttft_ms_p99<=5, x",
    ],
)
def test_what_is_not_a_limit_is_refused_and_named(text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_slo(text)
    assert text.rpartition(", ")[2] in caught.value.message


def test_the_same_percentile_is_limited_once() -> None:
    with pytest.raises(InvalidRequest, match="twice"):
        parse_slo("ttft_ms_p99<=500, ttft_ms_p99<=600")


def test_the_tightest_limit_of_a_metric_counts() -> None:
    slo = parse_slo("ttft_ms_p99<=500, ttft_ms_p50<=80, tpot_ms_p99<=60")
    assert slo.limit_ms("ttft_ms") == 80
    assert slo.limit_ms("e2e_ms") is None


@pytest.mark.parametrize(("ratio", "name"), [(0.5, "p50"), (0.9, "p90"), (0.99, "p99"), (0.999, "p99_9"), (0.05, "p5")])
def test_percentiles_have_names(ratio: float, name: str) -> None:
    assert percentile_name(ratio) == name


@given(
    metric=st.sampled_from(REQUEST_METRICS + POOLED_METRICS),
    hundredths=st.integers(1, 9_999),
    limit_ms=st.floats(1e-6, 1e15),
)
def test_a_limit_reads_back_as_it_prints(metric: str, hundredths: int, limit_ms: float) -> None:
    limit = Limit(metric=metric, percentile_ratio=round(hundredths / 10_000, 6), limit_ms=limit_ms)
    assert parse_slo(str(limit)).limits == (limit,)


def test_the_number_of_limits_is_bounded() -> None:
    limits = [f"ttft_ms_p{number}<=5" for number in range(1, LIMITS_MAX + 2)]
    assert len(parse_slo(", ".join(limits[:-1])).limits) == LIMITS_MAX
    with pytest.raises(InvalidRequest, match="at most 32 limits, not 33"):
        parse_slo(", ".join(limits))
