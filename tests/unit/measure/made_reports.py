"""Reports made from latencies, for tests of what is computed from reports."""

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from tailrace.clock import random_stream
from tailrace.measure.distribution import to_quantile
from tailrace.measure.record import DEFINITIONS
from tailrace.measure.report import (
    CacheUse,
    Distribution,
    Goodput,
    LengthQuantiles,
    Lengths,
    LimitResult,
    Little,
    Quantile,
    Rates,
    Report,
    Samples,
    Steadiness,
    Verdict,
)
from tailrace.measure.run_info import RunInfo
from tailrace.measure.slo import parse_slo, percentile_name
from tailrace.measure.statistics import early_stopping_bound, nearest_rank

SteadyVerdict = Literal["steady", "drifting", "saturated", "unknown"]
SLO = "ttft_ms_p99<=500"
NO_LENGTHS = LengthQuantiles(num=0, mean=None, p5=None, p50=None, p95=None, max=None)


def latencies(seed: int, num: int = 1500, scale: float = 100.0) -> np.ndarray:
    """Independent, between `scale` and a few times that."""
    return scale * (1 + random_stream(seed, "latencies").exponential(0.3, num))


def distribution(values: np.ndarray) -> Distribution:
    ascending = np.sort(values)
    ratios = (0.5, 0.9, 0.95, 0.99)
    percentiles = {percentile_name(r): to_quantile(nearest_rank(ascending, r)) for r in ratios}
    bounds: dict[str, Quantile] = {}
    for ratio in ratios:
        bound = early_stopping_bound(ascending, ratio)
        bounds[percentile_name(ratio)] = None if bound is None else to_quantile(bound)
    return Distribution(
        num=len(values),
        num_failed=int(np.isinf(values).sum()),
        num_undefined=0,
        percentiles=percentiles,
        successes=percentiles,
        bounds=bounds,
        mean_ms=None,
        min_ms=None,
        max_ms=to_quantile(float(ascending[-1])),
    )


def info(run_id: str, slo: str = SLO, rate: float | None = 10.0, **changed: object) -> RunInfo:
    made = RunInfo(
        definitions=DEFINITIONS,
        run_id=run_id,
        started_at="2026-01-01T00:00:00Z",
        url="http://127.0.0.1:8000",
        model="smollm2",
        api="chat",
        arrivals=f"poisson:{rate:g}" if rate else "closed:4",
        workload="chat",
        workload_sha256="ab" * 32,
        schedule_sha256="cd" * 32,
        seed=1,
        slo=parse_slo(slo),
        origin_ns=0,
        window_start_ns=0,
        window_end_ns=100_000_000_000,
        timeout_ns=60_000_000_000,
        offered_per_s=rate,
    )
    return msgspec.structs.replace(made, **changed)


def report(
    values: np.ndarray,
    run_id: str = "run-1",
    *,
    slo: str = SLO,
    rate: float = 10.0,
    steady: SteadyVerdict = "steady",
    invalid: Sequence[str] = (),
    little_agrees: bool = True,
    **changed: object,
) -> Report:
    """A run whose TTFT are `values` (inf: failed), TPOT a tenth, E2E the double; arrivals are evenly spaced."""
    num = len(values)
    window_s = num / rate
    column = [to_quantile(float(value)) for value in values]
    tenth = [to_quantile(float(value) / 10) for value in values]
    double = [to_quantile(float(value) * 2) for value in values]
    run_info = info(run_id, slo, rate, **changed)
    metrics = {
        "ttft_ms": distribution(values),
        "tpot_ms": distribution(values / 10),
        "e2e_ms": distribution(values * 2),
    }
    verdicts = {name: Verdict(state="ok") for name in ("client", "steady", "cache", "output", "tokens")}
    verdicts |= {name: Verdict(state="invalid", reasons=[f"{name} is wrong"]) for name in invalid}
    num_good = int(np.isfinite(values).sum())
    return Report(
        info=run_info,
        window_s=window_s,
        num_requests=num,
        num_planned_cancels=0,
        num_outside_window=0,
        outcomes={"ok": num_good, "failed": num - num_good},
        messages={},
        metrics=metrics,
        rates=Rates(
            offered_per_s=rate,
            issued_per_s=rate,
            completed_per_s=num_good / window_s,
            output_tokens_per_s=20 * num_good / window_s,
            prompt_tokens_per_s=100 * rate,
            schedule_ks=0.0,
        ),
        goodput=Goodput(
            num_attained=num_good,
            num=num,
            attainment_ratio=num_good / num,
            per_s=num_good / window_s,
            output_tokens_per_s=None,
        ),
        little=Little(
            in_flight_mean=1.0,
            arrivals_per_s=rate,
            residence_s_mean=0.1,
            difference_ratio=0.0 if little_agrees else 0.3,
            agrees=little_agrees,
        ),
        steadiness=Steadiness(
            verdict=steady,
            in_flight_slope_per_s=0.0,
            ttft_trend_ratio=1.0,
            truncation_ratio=0.0,
            reasons=[] if steady == "steady" else ["the queue grows"],
        ),
        lengths=Lengths(prompt_asked=NO_LENGTHS, prompt=NO_LENGTHS, output_asked=NO_LENGTHS, output=NO_LENGTHS),
        cache=CacheUse(num_prompt_tokens=0, num_declared_tokens=0, num_cached_tokens=None),
        limits=_limits(metrics, run_info),
        verdicts=verdicts,
        is_valid=not invalid,
        samples=Samples(
            scheduled_ms=[1000 * i / rate for i in range(num)],
            ttft_ms=column,
            tpot_ms=tenth,
            e2e_ms=double,
            stall_ms=tenth,
        ),
    )


def _limits(metrics: dict[str, Distribution], run_info: RunInfo) -> list[LimitResult]:
    results = []
    for limit in run_info.slo.limits:
        name = percentile_name(limit.percentile_ratio)
        found = metrics.get(limit.metric)
        value, bound = (found.percentiles[name], found.bounds[name]) if found else (None, None)
        passes = None if bound is None else float(bound) <= limit.limit_ms
        reason = "too few samples for a bound" if bound is None else f"the bound is {float(bound):.4g} ms"
        results.append(LimitResult(limit=str(limit), value_ms=value, bound_ms=bound, passes=passes, reason=reason))
    return results
