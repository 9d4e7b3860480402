"""Verdicts on the run itself: may its numbers be believed at all? `invalid` forbids every claim.

Each reason is one readable line: what was seen, against what, and what to do about it.
"""

from collections.abc import Iterator

import numpy as np

from tailrace.measure.metrics import tokens_after_first, tokens_are
from tailrace.measure.rates import issued_gaps_ms, scheduled_gaps_ms
from tailrace.measure.record import TokenCount
from tailrace.measure.report import Steadiness, Verdict
from tailrace.measure.run_info import ClientStats
from tailrace.measure.statistics import nearest_rank
from tailrace.measure.table import Bools, Floats
from tailrace.measure.window import Window

CLIENT_SHARE = 0.02
"""Of a limit that the client's own lateness may take."""
GC_PAUSE_SHARE = 0.1
"""Of a limit that one pause of the collector may take: rare, but it hits every stream at once."""
STEAL_RATIO_TOLD = 0.01
CPU_RATIO_MAX = 0.9
ISSUED_RATIO_MIN = 0.99
SCHEDULE_DISTANCE_MAX = 0.1
REQUEST_SHARE_MAX = 0.01
"""Of requests (or prompt tokens) that may contradict what was asked or declared."""
CACHE_BLOCK_TOKENS = 64
"""Caches count whole blocks: so much of a hit may be chance or rounding."""
CLOCK_SLACK_MS = 1.0
SCHEDULED_GAPS_MAX = 10_000
"""Of `RunInfo.scheduled_gaps_ns`: a full list may have been cut."""


def all_verdicts(window: Window, steadiness: Steadiness) -> dict[str, Verdict]:
    return {
        "client": client_verdict(window),
        "steady": steady_verdict(steadiness),
        "cache": cache_verdict(window),
        "output": output_verdict(window),
        "tokens": tokens_verdict(window),
    }


def client_verdict(window: Window) -> Verdict:
    """Whether the client sent what was scheduled when it was, and saw answers when they came."""
    wrong = [*_record_faults(window), *_schedule_faults(window)]
    allowed_ms = ttft_allowance_ms(window)
    stats = window.info.client
    unchecked = []
    if allowed_ms is None:
        unchecked.append("no TTFT to hold the client's lateness against: no request in the window ended well")
    else:
        wrong += _late("send lag p99", _send_lag_p99(window), allowed_ms, "use more senders or a quieter machine")
    if stats is None:
        unchecked.append("the senders left no measures of themselves, so the client was not judged")
    elif allowed_ms is not None:
        wrong += _client_faults(window, stats, allowed_ms)
    if stats is not None and stats.null_run is None:
        unchecked.append("no calibration against a null server was made")
    return _verdict(wrong, unchecked)


def steady_verdict(steadiness: Steadiness) -> Verdict:
    if steadiness.verdict == "steady":
        return Verdict(state="ok")
    state = "unknown" if steadiness.verdict == "unknown" else "invalid"
    return _verdict(steadiness.reasons if state == "invalid" else [], steadiness.reasons)


def cache_verdict(window: Window) -> Verdict:
    """Whether the server found more in its prefix cache than the workload declares shared.

    Judged on first turns: a later turn rightly finds its own conversation. Finding less is no fault of the run.
    """
    table = window.table
    rows = window.counted & table.known("num_cached_tokens") & table.known("num_prompt_tokens")
    rows &= ~table.known("turn") | (table.count("turn") == 0)
    if not rows.any():
        if not (window.counted & table.ok).any():
            return _verdict([], ["no answer ended well"])
        return _verdict([], ["the server does not say how many prompt tokens it found in its cache"])
    prompt = table.count("num_prompt_tokens")[rows]
    asked = np.where(table.known("num_prompt_tokens_asked"), table.count("num_prompt_tokens_asked"), 0)[rows]
    overhead = np.where(asked > 0, np.maximum(prompt - asked, 0), 0)
    free = table.count("num_shared_tokens")[rows] + CACHE_BLOCK_TOKENS + np.minimum(overhead, CACHE_BLOCK_TOKENS)
    excess = int(np.maximum(table.count("num_cached_tokens")[rows] - free, 0).sum())
    if excess <= REQUEST_SHARE_MAX * int(prompt.sum()):
        return Verdict(state="ok")
    share = excess / int(prompt.sum())
    return _verdict(
        [
            f"{share:.1%} of the prompt tokens came from the server's prefix cache although the workload does not "
            "share them: restart the server or use another seed"
        ]
    )


def output_verdict(window: Window) -> Verdict:
    """Whether answers have the length asked for, where the model was told not to stop by itself."""
    if not window.info.ignore_eos:
        return Verdict(state="ok", reasons=["answers end where the model ends them; their lengths are reported"])
    table = window.table
    by_server = table.known("num_output_tokens")
    got = np.where(by_server, table.count("num_output_tokens"), table.count("num_output_tokens_client"))
    rows = window.counted & table.ok & table.known("num_output_tokens_asked")
    rows &= by_server | table.known("num_output_tokens_client")
    if not rows.any():
        return _verdict([], ["no answer has both a length asked and a length counted"])
    asked = table.count("num_output_tokens_asked")
    off = rows & (np.abs(got - asked) > 1)
    share = float(off.sum() / rows.sum())
    if share <= REQUEST_SHARE_MAX:
        return Verdict(state="ok")
    return _verdict(
        [
            f"{share:.1%} of the answers are not as long as asked (median {np.median(got[off]):.0f} instead of "
            f"{np.median(asked[off]):.0f} tokens): does the server honour ignore_eos and max_tokens?"
        ]
    )


def tokens_verdict(window: Window) -> Verdict:
    """Whether the server and a tokenizer count the same number of tokens in the answers."""
    table = window.table
    good = window.counted & table.ok
    both = good & table.known("num_output_tokens") & table.known("num_output_tokens_client")
    unchecked = []
    if (good & tokens_are(table, TokenCount.UNKNOWN)).any():
        unchecked.append(
            "some answers have no count of tokens (the server sends no usage): rates of tokens are undefined"
        )
    if (good & tokens_are(table, TokenCount.LENGTH)).any():
        unchecked.append("tokens of each chunk are estimated from the length of its text: ITL is an estimate")
    if not both.any():
        return _verdict([], [*unchecked, "answers were not counted a second time; --tokenizer does so"])
    by_server, by_client = table.count("num_output_tokens")[both], table.count("num_output_tokens_client")[both]
    off = np.abs(by_server - by_client) > np.maximum(2, 0.01 * by_server)
    share = float(off.mean())
    if share > REQUEST_SHARE_MAX:
        return _verdict(
            [
                f"server and tokenizer disagree on {share:.1%} of the answers (in all {int(by_server.sum()):,} and "
                f"{int(by_client.sum()):,} tokens): is it the model's own tokenizer, is something hidden in the count?"
            ]
        )
    return _verdict([], unchecked)


def ttft_allowance_ms(window: Window) -> float | None:
    """What the client may add to a TTFT: 2 % of the tightest limit, without one of the median measured."""
    limit_ms = window.info.slo.limit_ms("ttft_ms")
    if limit_ms is None:
        values = np.sort(window.metrics["ttft_ms"][window.counted & window.table.ok])
        if not len(values):
            return None
        limit_ms = nearest_rank(values, 0.5)
    return CLIENT_SHARE * limit_ms


def chunk_allowance_ms(window: Window) -> float | None:
    """What the client may add to the instant of a chunk: 2 % of the tightest limit on gaps.

    A late chunk moves TPOT only by its share of the tokens, so a limit on TPOT allows that many times more.
    """
    slo = window.info.slo
    limits = [slo.limit_ms(metric) for metric in ("itl_ms", "chunk_gap_ms", "stall_ms")]
    tpot_ms = slo.limit_ms("tpot_ms")
    if tpot_ms is not None:
        after = tokens_after_first(window.table)[window.counted & window.table.ok]
        usual = float(np.nanmedian(after)) if len(after) and not np.isnan(after).all() else 1.0
        limits.append(tpot_ms * max(usual, 1.0))
    found = [limit for limit in limits if limit is not None]
    return CLIENT_SHARE * min(found) if found else None


def schedule_distance(scheduled_ms: Floats, issued_ms: Floats, slack_ms: float) -> float:
    """Kolmogorov-Smirnov distance that forgives shifts up to `slack_ms`: equal gaps stay equal when a timer jitters."""
    a, b = np.sort(scheduled_ms), np.sort(issued_ms)
    return max(_exceeds(a, b, slack_ms), _exceeds(b, a, slack_ms))


def _exceeds(a: Floats, b: Floats, slack_ms: float) -> float:
    """How much more of `a` lies below some point than of `b` below that point plus the slack."""
    return float((np.arange(1, len(a) + 1) / len(a) - np.searchsorted(b, a + slack_ms, side="right") / len(b)).max())


def _client_faults(window: Window, stats: ClientStats, allowed_ms: float) -> Iterator[str]:
    chunk_ms = chunk_allowance_ms(window)
    both_ms = allowed_ms if chunk_ms is None else min(allowed_ms, chunk_ms)
    more = "use more senders or a quieter machine" + _stolen(stats.steal_ratio)
    yield from _late("event loop lag p99", stats.loop_lag.p99_ms, both_ms, more)
    yield from _late(
        "longest pause of the collector", stats.gc_pause_ms_max, both_ms * GC_PAUSE_SHARE / CLIENT_SHARE, more
    )
    if stats.cpu_ratio_max > CPU_RATIO_MAX:
        yield f"the busiest sender used {stats.cpu_ratio_max:.0%} of a processor: use more senders"
    if stats.num_own_limit:
        yield f"{stats.num_own_limit:,} requests found no connection at a limit of the client's own host: raise it"
    null = stats.null_run
    if null is not None:
        yield from _late("TTFT p99 against a null server", null.ttft_ms_p99, allowed_ms, more)
        yield from _late("send lag p99 against a null server", null.send_lag_ms_p99, allowed_ms, more)
        yield from _late("chunk lag p99 against a null server", null.chunk_lag_ms_p99, chunk_ms or allowed_ms, more)


def _stolen(ratio: float | None) -> str:
    return "" if ratio is None or ratio < STEAL_RATIO_TOLD else f" (the host took {ratio:.0%} of this machine's time)"


def _send_lag_p99(window: Window) -> float:
    lags = window.metrics["send_lag_ms"][window.counted]
    lags = np.sort(lags[~np.isnan(lags)])
    return nearest_rank(lags, 0.99) if len(lags) else 0.0


def _late(what: str, value_ms: float, allowed_ms: float, advice: str) -> list[str]:
    if value_ms <= allowed_ms:
        return []
    if np.isinf(value_ms):
        return [f"{what}: requests of the schedule were never sent: {advice}"]
    return [
        f"{what} is {value_ms:.3g} ms, more than the {allowed_ms:.3g} ms that leave the numbers the server's: {advice}"
    ]


def _schedule_faults(window: Window) -> Iterator[str]:
    """An open schedule holds: every arrival was sent, in time, with the gaps that were drawn."""
    if window.is_closed or not window.scheduled.any():
        return
    slack_ns = (window.end_ns - window.start_ns) // 100
    table = window.table
    sent = window.scheduled & table.known("issued") & (table.time_ns("issued") < window.end_ns + slack_ns)
    share = float(sent.sum() / window.scheduled.sum())
    if share < ISSUED_RATIO_MIN:
        yield f"only {share:.1%} of the arrivals were sent by the end of the window: use more senders or a lower rate"
    wanted, issued = scheduled_gaps_ms(window), issued_gaps_ms(window)
    if len(wanted) < SCHEDULED_GAPS_MAX and len(issued) < ISSUED_RATIO_MIN * len(wanted) - 1:
        yield f"the schedule has {len(wanted) + 1} first arrivals in the window, the rows only {len(issued) + 1}"
    if len(wanted) and len(issued):
        distance = schedule_distance(wanted, issued, max(ttft_allowance_ms(window) or 0.0, CLOCK_SLACK_MS))
        if distance > SCHEDULE_DISTANCE_MAX:
            yield (
                f"gaps between requests are not those drawn (distance {distance:.2f}): the client bunches or delays "
                "them; use more senders"
            )


def _record_faults(window: Window) -> Iterator[str]:
    table = window.table
    ids = np.sort(table.request_hashes)
    repeats = int((ids[1:] == ids[:-1]).sum())
    if repeats:
        yield f"{repeats} rows repeat the id of another: the same rows were put together twice"
    backwards = np.zeros(len(table), np.bool_)
    for chain in (("scheduled", "issued", "connected", "sent", "ended"), ("scheduled", "headers", "last", "ended")):
        backwards |= _runs_backwards(window, chain)
    if backwards.any():
        yield f"{int(backwards.sum())} rows have times that run backwards: the senders' clocks disagree"


def _runs_backwards(window: Window, names: tuple[str, ...]) -> Bools:
    """[n] whether a known instant lies before an earlier one of the chain."""
    table = window.table
    latest = table.time_ns(names[0])
    found = np.zeros(len(table), np.bool_)
    for name in names[1:]:
        known, times = table.known(name), table.time_ns(name)
        found |= known & (times < latest - int(CLOCK_SLACK_MS * 1e6))
        latest = np.where(known, np.maximum(latest, times), latest)
    return found


def _verdict(wrong: list[str], unchecked: list[str] | None = None) -> Verdict:
    """What is wrong goes before what was not checked."""
    if wrong:
        return Verdict(state="invalid", reasons=wrong)
    return Verdict(state="unknown" if unchecked else "ok", reasons=unchecked or [])
