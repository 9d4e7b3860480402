"""Sums over the window of a report: rates, goodput, Little's law, lengths, use of the prefix cache."""

import numpy as np

from tailrace.measure.metrics import output_tokens, tokens_are
from tailrace.measure.record import TokenCount
from tailrace.measure.report import CacheUse, Goodput, LengthQuantiles, Lengths, Little, Rates
from tailrace.measure.slo import REQUEST_METRICS
from tailrace.measure.statistics import ks_distance, nearest_rank
from tailrace.measure.table import Bools, Floats
from tailrace.measure.window import Window

LITTLE_RATIO_MAX = 0.02
LITTLE_CHANCE_SIGMAS = 2.0


def rates(window: Window) -> Rates:
    table, seconds = window.table, window.seconds
    issued = issued_gaps_ms(window)
    scheduled = scheduled_gaps_ms(window)
    first = window.holds("first")
    prompt_known = bool(table.known("num_prompt_tokens")[first].all())
    prompt_tokens = int(table.count("num_prompt_tokens")[first].sum()) if prompt_known else None
    num_tokens, num_uncounted = _tokens_received(window)
    return Rates(
        offered_per_s=window.info.offered_per_s,
        issued_per_s=_per_s(int(window.holds("issued").sum()), seconds),
        completed_per_s=_per_s(int((table.ok & window.holds("ended")).sum()), seconds),
        output_tokens_per_s=_per_s(num_tokens, seconds),
        num_uncounted_chunks=num_uncounted,
        prompt_tokens_per_s=_maybe_per_s(prompt_tokens, seconds),
        schedule_ks=ks_distance(scheduled, issued) if len(scheduled) and len(issued) else None,
    )


def scheduled_gaps_ms(window: Window) -> Floats:
    """Of the first arrivals in the window, as the schedule was drawn; none in a closed loop."""
    return np.array(window.info.scheduled_gaps_ns, np.float64) / 1e6


def issued_gaps_ms(window: Window) -> Floats:
    """Between the same arrivals as they were sent. Later turns of a conversation are not the schedule's."""
    arrivals = window.scheduled & (~window.table.known("turn") | (window.table.count("turn") == 0))
    order = np.argsort(window.table.time_ns("scheduled")[arrivals], kind="stable")
    first = np.flatnonzero(arrivals)[order][: len(window.info.scheduled_gaps_ns) + 1]
    times = window.table.time_ns("issued")[first][window.table.known("issued")[first]]
    ordered = np.sort(times)
    return (ordered[1:] - ordered[:-1]) / 1e6


def attained(window: Window) -> Bools | None:
    """[n] counted requests that met every limit of their own. None without an SLO. A metric that is undefined for a
    request does not count against it."""
    slo = window.info.slo
    if not slo.limits:
        return None
    met: Bools = window.counted & window.table.ok
    for metric in REQUEST_METRICS:
        limit_ms = slo.limit_ms(metric)
        if limit_ms is not None:
            met &= ~(window.metrics[metric] > limit_ms)
    return met


def goodput(window: Window) -> Goodput | None:
    """None without an SLO."""
    met = attained(window)
    if met is None:
        return None
    num, num_attained = int(window.counted.sum()), int(met.sum())
    tokens = output_tokens(window.table)[met]
    return Goodput(
        num_attained=num_attained,
        num=num,
        attainment_ratio=num_attained / num if num else None,
        per_s=_per_s(num_attained, window.seconds),
        output_tokens_per_s=None if np.isnan(tokens).any() else _per_s(float(tokens.sum()), window.seconds),
    )


def little(window: Window) -> Little:
    """From scheduled arrival to the end, failures and planned cancellations included: all of them are load.

    L and lambda W differ by what lies across the edges of the window: stays that reach in from before add to L alone,
    what lasts past the end to W alone. In a steady state the two balance, up to chance: a sum of independent parts
    strays by about the root of the sum of their squares.
    """
    start_s, end_s = window.since_start_s("scheduled"), window.since_start_s("ended")
    inside = np.clip(np.minimum(end_s, window.seconds) - np.maximum(start_s, 0.0), 0.0, None)
    before = inside[start_s < 0]
    after = np.clip(end_s - window.seconds, 0.0, None)[window.scheduled]
    in_flight = _ordered_sum(inside) / window.seconds if window.seconds else 0.0
    spent = (end_s - start_s)[window.scheduled]
    arrivals_per_s = _per_s(len(spent), window.seconds)
    residence = _ordered_sum(spent) / len(spent) if len(spent) else None
    difference = chance = None
    if residence is not None and in_flight > 0:
        difference = (arrivals_per_s * residence - in_flight) / in_flight
        strays_s = float(np.sqrt(_ordered_sum(before * before) + _ordered_sum(after * after)))
        chance = LITTLE_CHANCE_SIGMAS * strays_s / (in_flight * window.seconds)
    return Little(
        in_flight_mean=in_flight,
        arrivals_per_s=arrivals_per_s,
        residence_s_mean=residence,
        difference_ratio=difference,
        chance_ratio=chance,
        agrees=_agrees(difference, chance),
    )


def _agrees(difference: float | None, chance: float | None) -> bool | None:
    if difference is None or chance is None:
        return None
    if abs(difference) <= LITTLE_RATIO_MAX:
        return True
    return None if abs(difference) <= LITTLE_RATIO_MAX + chance else False


def lengths(window: Window) -> Lengths:
    good = window.counted & window.table.ok
    return Lengths(
        prompt_asked=_lengths(window, "num_prompt_tokens_asked", window.counted),
        prompt=_lengths(window, "num_prompt_tokens", window.counted),
        output_asked=_lengths(window, "num_output_tokens_asked", window.counted),
        output=_lengths(window, "num_output_tokens", good),
    )


def cache_use(window: Window) -> CacheUse:
    table = window.table
    rows = window.counted & table.known("num_prompt_tokens")
    cached = rows & table.known("num_cached_tokens")
    return CacheUse(
        num_prompt_tokens=int(table.count("num_prompt_tokens")[rows].sum()),
        num_declared_tokens=int(table.count("num_shared_tokens")[rows].sum()),
        num_cached_tokens=int(table.count("num_cached_tokens")[cached].sum()) if cached.any() else None,
    )


def _tokens_received(window: Window) -> tuple[int, int]:
    """(tokens whose chunk arrived in the window, of whatever request; how many of these chunks count one for want of
    a count: their stream was cut before its `usage` came, and the server says nothing chunk by chunk)."""
    table = window.table
    uncounted = np.repeat(tokens_are(table, TokenCount.UNKNOWN), table.chunks.counts)
    num_tokens = num_uncounted = done = 0
    for instants, tokens in table.chunks.instants(table.time_ns("scheduled")):
        inside = (instants >= window.start_ns) & (instants < window.end_ns)
        num_tokens += int(tokens[inside].sum())
        num_uncounted += int(uncounted[done : done + len(tokens)][inside].sum())
        done += len(tokens)
    return num_tokens, num_uncounted


def _lengths(window: Window, name: str, rows: Bools) -> LengthQuantiles:
    values = np.sort(window.table.count(name)[rows & window.table.known(name)]).astype(np.float64)
    if not len(values):
        return LengthQuantiles(num=0, mean=None, p5=None, p50=None, p95=None, max=None)
    p5, p50, p95 = (nearest_rank(values, ratio) for ratio in (0.05, 0.5, 0.95))
    return LengthQuantiles(num=len(values), mean=float(values.mean()), p5=p5, p50=p50, p95=p95, max=int(values[-1]))


def _ordered_sum(values: Floats) -> float:
    """The same to the last bit in whatever order the values come."""
    return float(np.sort(values).sum())


def _per_s(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0


def _maybe_per_s(amount: float | None, seconds: float) -> float | None:
    return None if amount is None else _per_s(amount, seconds)
