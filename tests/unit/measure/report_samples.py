"""A report and its curves, made by hand, for tests of what is shown."""

import numpy as np

from tailrace.measure.pages.series import RateSeries, RunSeries, WaterfallRow, cdf, flight, percentiles_over_time
from tailrace.measure.report import (
    CacheUse,
    Distribution,
    Goodput,
    LengthQuantiles,
    Lengths,
    LimitResult,
    Little,
    Rates,
    Report,
    Samples,
    Steadiness,
    Verdict,
)
from tailrace.measure.run_info import ClientStats, Lag, NullRun, RunInfo
from tailrace.measure.slo import parse_slo

WINDOW_S = 60.0


def make_info(model: str = "tiny", slo: str = "ttft_ms_p99<=500, tpot_ms_p99<=60", seed: int = 7) -> RunInfo:
    return RunInfo(
        run_id="run-7",
        started_at="2026-01-02T03:04:05+00:00",
        url="http://127.0.0.1:8000",
        model=model,
        api="chat",
        arrivals="poisson:4",
        workload="chat",
        workload_sha256="ab" * 32,
        schedule_sha256="cd" * 32,
        seed=seed,
        slo=parse_slo(slo),
        origin_ns=0,
        window_start_ns=5 * 10**9,
        window_end_ns=65 * 10**9,
        timeout_ns=60 * 10**9,
        offered_per_s=4.0,
        client=ClientStats(
            num_senders=1,
            loop_lag=Lag(p50_ms=0.05, p99_ms=0.4, max_ms=2.5),
            gc_pause_ms_max=0.0,
            num_gc_pauses=0,
            cpu_ratio_max=0.12,
            num_connections_opened=9,
            num_connections_reused=231,
            num_in_flight_max=9,
            num_cpus=2,
            governor="performance",
            null_run=NullRun(num_requests=100, ttft_ms_p99=0.9, send_lag_ms_p99=0.2, chunk_lag_ms_p99=0.3),
        ),
        server={"id": model},
        machine={"kernel": "6.1"},
        notes=["lengths were realised with 2 probes"],
    )


def make_distribution(p50: float, p99: "float | str", failed: int = 0) -> Distribution:
    last = "inf" if p99 == "inf" else float(p99)
    return Distribution(
        num=240,
        num_failed=failed,
        num_undefined=1,
        percentiles={"p50": p50, "p90": p50 * 2, "p95": p50 * 3, "p99": last},
        successes={"p50": p50, "p90": p50 * 2, "p95": p50 * 3, "p99": p50 * 4},
        bounds={"p50": p50 * 1.1, "p90": p50 * 2.2, "p95": p50 * 4, "p99": None},
        mean_ms=p50,
        min_ms=p50 / 2,
        max_ms=last,
    )


def make_report(
    model: str = "tiny",
    message: str = "no room",
    slo: str = "ttft_ms_p99<=500, tpot_ms_p99<=60",
    passes: bool | None = None,
) -> Report:
    lengths = LengthQuantiles(num=240, mean=100.5, p5=10.0, p50=90.0, p95=300.0, max=512)
    return Report(
        info=make_info(model, slo),
        window_s=WINDOW_S,
        num_requests=240,
        num_planned_cancels=3,
        num_outside_window=20,
        outcomes={"ok": 236, "refused": 4},
        messages={message: 4},
        metrics={
            "ttft_ms": make_distribution(120.0, "inf", failed=4),
            "send_lag_ms": make_distribution(0.05, 0.4),
            "tpot_ms": make_distribution(21.0, 44.0),
            "itl_ms": make_distribution(20.0, 60.0),
            "chunk_gap_ms": make_distribution(20.0, 61.0),
            "e2e_ms": make_distribution(2000.0, "inf", failed=4),
        },
        rates=Rates(
            offered_per_s=4.0,
            issued_per_s=4.1,
            completed_per_s=3.9,
            output_tokens_per_s=391.2,
            prompt_tokens_per_s=400.0,
            schedule_ks=0.01,
        ),
        goodput=Goodput(num_attained=230, num=240, attainment_ratio=230 / 240, per_s=3.83, output_tokens_per_s=380.0),
        little=Little(
            in_flight_mean=8.2, arrivals_per_s=4.0, residence_s_mean=2.05, difference_ratio=0.004, agrees=True
        ),
        steadiness=Steadiness(
            verdict="steady", in_flight_slope_per_s=0.001, ttft_trend_ratio=1.02, truncation_ratio=0.1, reasons=[]
        ),
        lengths=Lengths(prompt_asked=lengths, prompt=lengths, output_asked=lengths, output=lengths),
        cache=CacheUse(num_prompt_tokens=24_000, num_declared_tokens=0, num_cached_tokens=64),
        limits=[
            LimitResult(
                limit="ttft_ms_p99<=500", value_ms="inf", bound_ms=None, passes=passes, reason="240 of 662 samples"
            ),
            LimitResult(limit="tpot_ms_p99<=60", value_ms=44.0, bound_ms=None, passes=passes, reason="240 of 662"),
        ],
        verdicts={
            "client": Verdict(state="ok"),
            "steady": Verdict(state="ok"),
            "cache": Verdict(state="ok"),
            "output": Verdict(state="ok"),
            "tokens": Verdict(state="unknown", reasons=["no tokenizer was named"]),
        },
        is_valid=True,
        samples=Samples(scheduled_ms=[], ttft_ms=[], tpot_ms=[], e2e_ms=[], stall_ms=[]),
    )


def make_series() -> RunSeries:
    rng = np.random.default_rng(5)
    scheduled = np.sort(rng.uniform(0, 70, 280))
    ttft = rng.lognormal(4.8, 0.5, 280)
    ttft[::60] = np.inf
    tpot = rng.lognormal(3.0, 0.2, 280)
    first = np.where(np.isinf(ttft), np.nan, scheduled + ttft / 1e3)
    ended = np.where(np.isinf(ttft), scheduled + 0.01, scheduled + ttft / 1e3 + 2)
    edges = np.arange(0.0, 72.0, 2.0)
    return RunSeries(
        window_start_s=5.0,
        window_end_s=65.0,
        cdfs={"ttft_ms": cdf(ttft), "itl_ms": cdf(rng.lognormal(3, 0.3, 9000)), "e2e_ms": cdf(ttft + 2000)},
        ttft=percentiles_over_time(scheduled, ttft, edges),
        tpot=percentiles_over_time(scheduled, tpot, edges),
        flight=flight(scheduled, first, ended),
        rates=RateSeries(
            t_s=((edges[:-1] + edges[1:]) / 2).tolist(),
            interval_s=2.0,
            arrivals_per_s=[4.0] * 35,
            completed_per_s=[3.9] * 35,
            output_tokens_per_s=[390.0] * 35,
            attained_per_s=[3.8] * 35,
            outcomes={"ok": [8] * 35, "refused": [0, 1, 0, 0, 0] * 7},
        ),
        slowest=[
            WaterfallRow(
                row=i + 1,
                outcome="ok",
                num_prompt_tokens=900,
                num_output_tokens=60,
                phases=[
                    ("send lag", 0.0, 0.3),
                    ("connect", 0.3, 2.0),
                    ("send", 2.0, 2.2),
                    ("headers", 2.2, 9.0),
                    ("first token", 9.0, 400.0 + 9 * i),
                    ("stream", 400.0 + 9 * i, 2400.0),
                    ("end", 2400.0, 2401.0),
                ],
                chunks_ms=np.linspace(400.0 + 9 * i, 2400.0, 60).tolist(),
            )
            for i in range(12)
        ],
    )
