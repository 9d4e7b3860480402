"""The highest open-loop rate at which a service keeps the SLO: screened with short runs, confirmed with long ones.

`tailrace saturate` asks for five long runs at each end; for five services at a few requests a second on two cores that
is a day. Here a screen is one short run and its own percentiles; what counts is the confirmation: one run of >= 1,000
requests at the rate found, and a step lower each time that it does not hold.
"""

from collections.abc import Callable
from typing import Any

from common import say

START_PER_S = 1.0
SCREEN_RATIO = 1.15
"""Between the last passing and the first failing screen."""
SCREENS_MAX = 12
CONFIRMATIONS_MAX = 4
FLOOR_PER_S, CEILING_PER_S = 0.05, 64.0

Report = dict[str, Any]
Run = Callable[[float, int], Report]
"""(rate, number of requests) -> report of one run."""


def highest_rate(run: Run, num_screen: int, num_confirm: int) -> dict[str, Any]:
    """{"rate_per_s": confirmed or None, "probes": [...]}."""
    probes: list[dict[str, Any]] = []

    def probe(rate: float, num: int) -> bool:
        probes.append(_summary(rate, num, run(rate, num)))
        say(f"  {rate:.3g}/s, {num} requests: {probes[-1]}")
        return bool(probes[-1]["holds"])

    rate = _screen(lambda rate: probe(rate, num_screen))
    for _ in range(CONFIRMATIONS_MAX):
        if rate is None or rate < FLOOR_PER_S:
            break
        if probe(rate, num_confirm):
            return {"rate_per_s": round(rate, 4), "probes": probes}
        rate /= SCREEN_RATIO
    return {"rate_per_s": None, "probes": probes}


def _screen(holds: Callable[[float], bool]) -> float | None:
    """The highest rate that a screen passed; None when none did."""
    low: float | None = None
    high: float | None = None
    rate = START_PER_S
    for _ in range(SCREENS_MAX):
        if holds(rate):
            low = rate
        else:
            high = rate
        if low is None:
            rate /= 2
        elif high is None:
            rate *= 2
        elif high / low <= SCREEN_RATIO:
            break
        else:
            rate = (low * high) ** 0.5
        if not FLOOR_PER_S <= rate <= CEILING_PER_S:
            break
    return low


def _summary(rate: float, num: int, report: Report) -> dict[str, Any]:
    """`holds`: every limit by the percentile itself, and the queue did not grow."""
    limits = {each["limit"]: [each["value_ms"], each["bound_ms"]] for each in report["limits"]}
    within = all(_within(each) for each in report["limits"])
    saturated = report["steadiness"]["verdict"] == "saturated"
    return {
        "rate_per_s": round(rate, 4),
        "requests": num,
        "holds": within and not saturated,
        "limits": limits,
        "steadiness": report["steadiness"]["verdict"],
        "client": report["verdicts"]["client"]["state"],
        "outcomes": report["outcomes"],
        "attainment": report["goodput"]["attainment_ratio"],
    }


def _within(limit: dict[str, Any]) -> bool:
    value = limit["value_ms"]
    return isinstance(value, int | float) and value <= float(limit["limit"].rpartition("<=")[2])
