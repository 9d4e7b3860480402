"""The shape of a report: what one measured run says, ready for JSON. Made by `measure.build`, shown by `measure.pages`.

Times are milliseconds. A quantile is a number, `"inf"` when failures reach that far, or None when it is undefined
(no sample); undefined is never zero.
"""

from typing import Literal

import msgspec

from tailrace.measure.run_info import RunInfo

Quantile = float | Literal["inf"] | None


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """One metric over the requests of the window (or, for pooled metrics, over their chunks and tokens)."""

    num: int
    """Samples, failures included."""
    num_failed: int
    """Requests without a value because they did not end well: +inf."""
    num_undefined: int
    """Requests for which the metric has no meaning (TPOT of a one-chunk answer): left out, and counted here."""
    num_estimated: int = 0
    """Samples that rest on an estimate of tokens per chunk, or on one gap shared by several tokens (smeared)."""
    percentiles: dict[str, Quantile]
    """`p50`, `p90`, `p95`, `p99` and those of the SLO: nearest rank over all."""
    successes: dict[str, Quantile]
    """The same over requests that ended well, for comparison with tools that leave the others out."""
    bounds: dict[str, Quantile]
    """Upper bound of each percentile at 99 % confidence (MLPerf early stopping); None: too few samples for any."""
    mean_ms: float | None
    min_ms: float | None
    max_ms: Quantile


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Per second of the window."""

    offered_per_s: float | None
    issued_per_s: float
    completed_per_s: float
    """Answers that ended well inside the window, whenever they arrived."""
    output_tokens_per_s: float
    """Tokens received inside the window, those of unfinished requests included."""
    num_uncounted_chunks: int = 0
    """Chunks in it that count one token for want of a count: then the rate is at least the figure."""
    prompt_tokens_per_s: float | None
    """Prompt tokens of requests whose first token fell into the window."""
    schedule_ks: float | None
    """Kolmogorov-Smirnov distance between scheduled and issued gaps; None in a closed loop."""


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    num_attained: int
    num: int
    attainment_ratio: float | None
    per_s: float
    output_tokens_per_s: float | None


class Little(msgspec.Struct, frozen=True, kw_only=True):
    """L = lambda W: a run in a steady state agrees with itself."""

    in_flight_mean: float
    arrivals_per_s: float
    residence_s_mean: float | None
    difference_ratio: float | None
    chance_ratio: float | None = None
    """How far the requests that lie across an edge of the window may move the difference by chance."""
    agrees: bool | None
    """Within 2 %. None: it is not, and chance may explain that; a longer window would tell."""


class Steadiness(msgspec.Struct, frozen=True, kw_only=True):
    verdict: Literal["steady", "drifting", "saturated", "unknown"]
    in_flight_slope_per_s: float | None
    ttft_trend_ratio: float | None
    """Median TTFT of the second half of the window / of the first half."""
    truncation_ratio: float | None
    """Where MSER-5 would cut the start of the window; above 0.5 there is no steady part."""
    reasons: list[str]


class LengthQuantiles(msgspec.Struct, frozen=True, kw_only=True):
    num: int
    mean: float | None
    p5: float | None
    p50: float | None
    p95: float | None
    max: int | None


class Lengths(msgspec.Struct, frozen=True, kw_only=True):
    prompt_asked: LengthQuantiles
    prompt: LengthQuantiles
    output_asked: LengthQuantiles
    output: LengthQuantiles


class CacheUse(msgspec.Struct, frozen=True, kw_only=True):
    num_prompt_tokens: int
    num_declared_tokens: int
    num_cached_tokens: int | None
    """None: the server does not say."""


class LimitResult(msgspec.Struct, frozen=True, kw_only=True):
    limit: str
    value_ms: Quantile
    bound_ms: Quantile
    passes: bool | None
    """None: cannot be said (too few samples, or a verdict forbids the claim); the reason says which."""
    reason: str


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """One check of the run itself. `invalid` forbids every claim; `unknown` says what was not checked."""

    state: Literal["ok", "invalid", "unknown"]
    reasons: list[str] = []


class Samples(msgspec.Struct, frozen=True, kw_only=True):
    """Columns of the requests in the window, for intervals between reports: at most 20,000, thinned evenly.

    ms; None for undefined, "inf" for failed.
    """

    scheduled_ms: list[float]
    ttft_ms: list[Quantile]
    tpot_ms: list[Quantile]
    e2e_ms: list[Quantile]
    stall_ms: list[Quantile]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    info: RunInfo
    window_s: float
    num_requests: int
    """Scheduled in the window, planned cancellations left out."""
    num_planned_cancels: int
    num_outside_window: int
    outcomes: dict[str, int]
    """Of all requests scheduled in the window."""
    messages: dict[str, int]
    """The most frequent failure messages."""
    metrics: dict[str, Distribution]
    """`ttft_ms`, `ttft_service_ms`, `send_lag_ms`, `connect_ms`, `ttfo_ms`, `tpot_ms`, `itl_ms`, `chunk_gap_ms`,
    `stall_ms`, `e2e_ms`, `tail_ms`."""
    rates: Rates
    goodput: Goodput | None
    little: Little
    steadiness: Steadiness
    lengths: Lengths
    cache: CacheUse
    limits: list[LimitResult]
    verdicts: dict[str, Verdict]
    """`client`, `steady`, `cache`, `output`, `tokens`."""
    is_valid: bool
    """No verdict is `invalid`."""
    samples: Samples

    @property
    def num_failed(self) -> int | None:
        """Of `num_requests`, those that did not end well; None in a report without TTFT."""
        ttft = self.metrics.get("ttft_ms")
        return None if ttft is None else ttft.num_failed


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    low_ms: Quantile
    high_ms: Quantile
    confidence_ratio: float
    num_runs: int
    num_blocks: int


class BenchResult(msgspec.Struct, frozen=True, kw_only=True):
    """What `tailrace bench --json` prints: one report a repeat, and what they say together."""

    definitions: str
    reports: list[Report]
    intervals: dict[str, Interval]
    """`ttft_ms_p99` and so on: hierarchical bootstrap over runs, then over blocks of time."""
    passes: bool | None
    """Whether every limit holds for the upper end of its interval (one run: for its bound)."""
    reasons: list[str]
