"""Distributions of a report: nearest rank over all requests, failures as +inf, with the bound that a claim needs."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from tailrace.measure.metrics import Pool, chunk_gap_pool, itl_pool, pooled_quantile, tokens_are
from tailrace.measure.record import TokenCount
from tailrace.measure.report import Distribution, Quantile
from tailrace.measure.slo import Slo, percentile_name
from tailrace.measure.statistics import early_stopping_bound, early_stopping_t, nearest_rank
from tailrace.measure.table import Bools, Floats, Ints, RecordTable

RATIOS = (0.5, 0.9, 0.95, 0.99)
"""Percentiles of every metric; those of the SLO come on top."""


def ratios_for(metric: str, slo: Slo) -> list[float]:
    """Percentiles to report, ascending."""
    return sorted({*RATIOS, *(limit.percentile_ratio for limit in slo.limits if limit.metric == metric)})


def to_quantile(value: float | None) -> Quantile:
    """For JSON, which has no infinity: "inf"; None for undefined."""
    if value is None or np.isnan(value):
        return None
    return "inf" if np.isinf(value) else round(float(value), 6)


def request_distribution(values: Floats, ratios: Sequence[float], num_estimated: int = 0) -> Distribution:
    """Of a metric with one value a request: `values` [n] ms, +inf failed, NaN undefined."""
    ordered = np.sort(values[~np.isnan(values)])
    finite = ordered[: np.searchsorted(ordered, np.inf)]
    return Distribution(
        num=len(ordered),
        num_failed=len(ordered) - len(finite),
        num_undefined=len(values) - len(ordered),
        num_estimated=num_estimated,
        percentiles=_named(ratios, lambda ratio: nearest_rank(ordered, ratio) if len(ordered) else None),
        successes=_named(ratios, lambda ratio: nearest_rank(finite, ratio) if len(finite) else None),
        bounds=_named(ratios, lambda ratio: early_stopping_bound(ordered, ratio)),
        mean_ms=round(float(finite.mean()), 6) if len(finite) else None,
        min_ms=float(finite[0]) if len(finite) else None,
        max_ms=to_quantile(float(ordered[-1])) if len(ordered) else None,
    )


def chunk_gap_distribution(table: RecordTable, counted: Bools, ratios: Sequence[float]) -> Distribution:
    """Pooled: one sample a chunk after the first of its request."""
    observed = np.maximum(table.chunks.counts - 1, 0)
    pools = [chunk_gap_pool(table, counted & table.ok), chunk_gap_pool(table, counted & ~table.ok)]
    return _pooled(table, counted, observed, pools, ratios, num_estimated=0)


def itl_distribution(table: RecordTable, counted: Bools, ratios: Sequence[float]) -> Distribution:
    """Pooled: one sample a token after the first chunk of its request. Requests whose tokens are unknown have none."""
    known = counted & ~tokens_are(table, TokenCount.UNKNOWN)
    observed = np.where(known, table.chunks.token_sums() - table.chunks.first_tokens(), 0)
    made = [itl_pool(table, known & table.ok), itl_pool(table, known & ~table.ok)]
    shared_out = int(observed[known & tokens_are(table, TokenCount.LENGTH)].sum())
    num_estimated = max(sum(smeared for _, smeared in made), shared_out)
    return _pooled(table, counted, observed, [pool for pool, _ in made], ratios, num_estimated)


def _pooled(
    table: RecordTable, counted: Bools, observed: Ints, pools: list[Pool], ratios: Sequence[float], num_estimated: int
) -> Distribution:
    """`pools` of requests that ended well and of the others; `observed` [n] samples of each request."""
    good, bad = counted & table.ok & (observed > 0), counted & ~table.ok
    num_good, num_bad = int(good.sum()), int(bad.sum())
    ordinary = round(pools[0].num / num_good) if num_good else 0
    # A request that failed weighs as much as an ordinary one: what it owed of that is +inf, at least one sample.
    num_inf = int(np.maximum(ordinary - observed[bad], 1).sum())
    num_values = sum(pool.num for pool in pools)
    runs = [run for pool in pools for run in pool.values()]

    def bound(ratio: float) -> float | None:
        # Samples of one request resemble each other: the bound counts requests, and takes their rank in the samples.
        allowed = early_stopping_t(num_good + num_bad, ratio)
        if allowed is None:
            return None
        return pooled_quantile(pools, num_inf, 1 - (allowed - 1) / (num_good + num_bad))

    return Distribution(
        num=num_values + num_inf,
        num_failed=num_bad,
        num_undefined=int((counted & table.ok).sum()) - num_good,
        num_estimated=num_estimated,
        percentiles=_named(ratios, lambda ratio: pooled_quantile(pools, num_inf, ratio)),
        successes=_named(ratios, lambda ratio: pooled_quantile(pools[:1], 0, ratio)),
        bounds=_named(ratios, bound),
        mean_ms=round(sum(pool.total for pool in pools) / num_values, 6) if num_values else None,
        min_ms=min((float(run[0]) for run in runs), default=None),
        max_ms="inf" if num_inf else max((float(run[-1]) for run in runs), default=None),
    )


def _named(ratios: Iterable[float], value: Callable[[float], float | None]) -> dict[str, Quantile]:
    return {percentile_name(ratio): to_quantile(value(ratio)) for ratio in ratios}
