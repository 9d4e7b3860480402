"""Which probe comes next in the search for the highest rate that meets an objective. Pure: no clock, no load.

How to use it (`cli/saturate.py` does):

    search = SaturationSearch(settings, seed)
    while isinstance(probe := search.next_probe(), Probe):
        report = ...                      # a fresh run at probe.rate_per_s, its seed from probe.number
        search.record(probe, judge(report))
    result = search.result()              # at any time, so an interrupted search has one too

The way: double from the start rate until a run fails (or halve until one passes), bisect on the log of the rate until
the bracket is narrow, then make fresh runs (at least five) at both ends in random order. An end stands when all of its
fresh runs agree, or all but one of eight. Where they do not, the end moves outward and is tried anew: a rate at which
runs disagree belongs inside the bracket, not at its end. A pass is a steady, valid run whose bounds are within the
limits; a bound that cannot be known is not a pass. Everything is bounded by `runs_max`.
"""

import math
from typing import Literal

import msgspec

from tailrace.clock import random_stream
from tailrace.errors import InvalidRequest
from tailrace.measure.run_summary import RunOutcome, RunVerdict
from tailrace.measure.saturation_result import ProbeResult, SaturationResult, Status, build_result

Purpose = Literal["double", "halve", "bisect", "confirm"]
Standing = Literal["pass", "fail", "undecided", "open"]

ROUNDING_RATIO = 0.001
"""Rates have four digits."""
CONTRADICTIONS_MAX = 1
EXTRA_RUNS = 3
"""A rate that passes every second time stands with a chance of 1 in 20 (five of five, or seven of eight). On simulated
systems whose limit varies by 5 to 20 % from run to run the bracket then holds the limit in over 90 of 100 searches."""
RETRIES_OF_INVALID = 1
"""A hiccup of the machine may spoil one run; a second spoilt one in a row is no hiccup."""


class SaturationSettings(msgspec.Struct, frozen=True, kw_only=True):
    start_per_s: float = 1.0
    floor_per_s: float = 0.01
    """The search gives up below."""
    ceiling_per_s: float = 1000.0
    resolution_ratio: float = 1.1
    """The bracket is narrow when its upper end is at most that much above its lower."""
    confirm_runs: int = 5
    """Fresh runs at each end; one that contradicts the others calls for EXTRA_RUNS more, two leave it undecided."""
    runs_max: int = 60

    def check(self) -> None:
        """Raises InvalidRequest that names the setting at fault."""
        if not 0 < self.floor_per_s <= self.start_per_s <= self.ceiling_per_s < math.inf:
            raise InvalidRequest(
                f"the rates must rise from floor {self.floor_per_s:g} over start {self.start_per_s:g}"
                f" to ceiling {self.ceiling_per_s:g} requests/s",
                param="start_per_s",
            )
        if not 1.01 <= self.resolution_ratio <= 2:
            raise InvalidRequest("the resolution lies between 1.01 and 2", param="resolution_ratio")
        if self.confirm_runs < 5:
            raise InvalidRequest("an end of the bracket needs at least 5 fresh runs", param="confirm_runs")
        if not 1 <= self.runs_max <= 10_000:
            raise InvalidRequest("between 1 and 10,000 runs are made", param="runs_max")


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """One run to make."""

    number: int
    """From 0; a fresh seed for the run."""
    rate_per_s: float
    purpose: Purpose


class Done(msgspec.Struct, frozen=True, kw_only=True):
    status: Status
    reason: str


class SaturationSearch:
    """State: the two ends so far, and all runs. `next_probe` is the same until `record` answers it.

    Raises InvalidRequest for settings without sense.
    """

    def __init__(self, settings: SaturationSettings, seed: int) -> None:
        settings.check()
        self._settings = settings
        self._seed = seed
        self._low: float | None = None
        """The highest rate held to pass."""
        self._high: float | None = None
        """The lowest rate held to fail."""
        self._runs: list[ProbeResult] = []
        self._num_steps_out = {"low": 0, "high": 0}
        self._stopped: Done | None = None

    def next_probe(self) -> Probe | Done:
        if self._stopped is not None:
            return self._stopped
        self._move_ends()
        rate, purpose = self._next_step()
        if rate is None:
            return self._end()
        if len(self._runs) >= self._settings.runs_max:
            return Done(status="runs_spent", reason=f"all {self._settings.runs_max} runs are spent; allow more")
        return Probe(number=len(self._runs), rate_per_s=rate, purpose=purpose)

    def record(self, probe: Probe, verdict: RunVerdict) -> None:
        """The outcome of the probe that `next_probe` gave last."""
        assert probe == self.next_probe(), "an outcome belongs to the probe that was asked for"
        self._runs.append(
            ProbeResult(
                rate_per_s=probe.rate_per_s,
                purpose=probe.purpose,
                outcome=verdict.outcome,
                summary=verdict.summary,
                reasons=verdict.reasons,
            )
        )
        if self._runs[-1].is_spoilt:
            self._stop_if_spoilt_again()
            return
        if verdict.outcome is RunOutcome.TOO_FEW and self._low is None:
            # Lower rates bring fewer requests still; a fixed number of them brings no more.
            self._stopped = Done(status="too_few_samples", reason=_first(verdict, "the bound cannot be known"))
            return
        if probe.purpose != "confirm":
            if verdict.outcome is RunOutcome.PASS:
                self._low = probe.rate_per_s
            else:
                self._high = probe.rate_per_s

    def result(self) -> SaturationResult:
        """What is known now: an end that was chosen and not yet tried gives way to the nearest one that stands."""
        step = self.next_probe()
        done = step if isinstance(step, Done) else Done(status="interrupted", reason="the search was ended early")
        low, high = self._tried_ends()
        standings = [
            (self._standing(rate), wanted) for rate, wanted in ((low, "pass"), (high, "fail")) if rate is not None
        ]
        return build_result(
            self._runs,
            last_pass_per_s=low,
            first_fail_per_s=high,
            is_confirmed=bool(standings) and all(standing == wanted for standing, wanted in standings),
            status=done.status,
            reason=done.reason,
            seed=self._seed,
        )

    def _tried_ends(self) -> tuple[float | None, float | None]:
        low, high = self._low, self._high
        passed = {run.rate_per_s for run in self._runs if run.outcome is RunOutcome.PASS}
        failed = {run.rate_per_s for run in self._runs if run.outcome in (RunOutcome.FAIL, RunOutcome.TOO_FEW)}
        if low is not None and low not in passed:
            low = max((rate for rate in passed if rate < low and self._standing(rate) == "pass"), default=None)
        if high is not None and high not in failed:
            high = min((rate for rate in failed if rate > high and self._standing(rate) == "fail"), default=None)
        return low, high

    def _next_step(self) -> tuple[float | None, Purpose]:
        """A rate and what it is for; None when both ends stand."""
        settings, low, high = self._settings, self._low, self._high
        if low is None and high is None:
            return settings.start_per_s, "double"
        if high is None and low is not None and self._has_room(low, settings.ceiling_per_s):
            return min(low * 2, settings.ceiling_per_s), "double"
        if low is None and high is not None and self._has_room(high, settings.floor_per_s):
            return max(high / 2, settings.floor_per_s), "halve"
        if low is not None and high is not None and self._may_bisect(low, high):
            return _rounded(math.sqrt(low * high)), "bisect"
        return self._confirmation(), "confirm"

    def _has_room(self, end: float, edge: float) -> bool:
        """Whether the other end may yet be found further out: the edge of the search is neither reached nor judged."""
        return end != edge and self._standing(edge) == "open"

    def _may_bisect(self, low: float, high: float) -> bool:
        """Not over a rate that has its fresh runs and became no end: where they disagree, the bracket stays wide."""
        if high / low <= self._settings.resolution_ratio * (1 + ROUNDING_RATIO):
            return False
        inside = {run.rate_per_s for run in self._runs if low < run.rate_per_s < high}
        return all(self._standing(rate) == "open" for rate in inside)

    def _confirmation(self) -> float | None:
        """One of the runs still owed to the ends, each as likely as any other: a random order of all of them."""
        owed = [
            rate
            for rate in (self._low, self._high)
            if rate is not None and self._standing(rate) == "open"
            for _ in range(self._num_owed(rate))
        ]
        if not owed:
            return None
        return owed[int(random_stream(self._seed, f"saturation-{len(self._runs)}").integers(len(owed)))]

    def _count(self, rate: float) -> tuple[int, int]:
        """Fresh runs at a rate that passed, and that did not. Spoilt ones say nothing."""
        fresh = [
            run.outcome
            for run in self._runs
            if run.rate_per_s == rate and run.purpose == "confirm" and not run.is_spoilt
        ]
        num_passed = fresh.count(RunOutcome.PASS)
        return num_passed, len(fresh) - num_passed

    def _standing(self, rate: float) -> Standing:
        """What the fresh runs at a rate say: all of them, or all but one of more of them."""
        num_passed, num_failed = self._count(rate)
        if min(num_passed, num_failed) > CONTRADICTIONS_MAX:
            return "undecided"
        if self._num_owed(rate) > 0:
            return "open"
        return "pass" if num_passed > num_failed else "fail"

    def _num_owed(self, rate: float) -> int:
        num_passed, num_failed = self._count(rate)
        wanted = self._settings.confirm_runs + EXTRA_RUNS * min(num_passed, num_failed)
        return wanted - num_passed - num_failed

    def _move_ends(self) -> None:
        """What the fresh runs contradict moves outward, once both ends have all of theirs."""
        low, high = self._low, self._high
        low_is = None if low is None else self._standing(low)
        high_is = None if high is None else self._standing(high)
        if "open" in (low_is, high_is):
            return
        if low is not None and low_is != "pass":
            # A clear failure is the new upper end, unless the old one passes: that is no order, and both stay inside.
            if low_is == "fail" and high_is != "pass":
                self._high = low
            self._low = self._outward("low", low)
        if high is not None and high_is in ("pass", "undecided"):
            if high_is == "pass" and low_is in ("pass", None):
                self._low = high
            self._high = self._outward("high", high) if self._high == high else self._high

    def _outward(self, side: Literal["low", "high"], rate: float) -> float | None:
        """The next candidate beyond an end, None at the edge. Steps grow, but pass by no rate that did as it should."""
        settings = self._settings
        factor = settings.resolution_ratio ** (2 ** min(self._num_steps_out[side], 6))
        self._num_steps_out[side] += 1
        if rate == (settings.floor_per_s if side == "low" else settings.ceiling_per_s):
            return None
        if side == "low":
            passed = [r.rate_per_s for r in self._runs if r.rate_per_s < rate and r.outcome is RunOutcome.PASS]
            agreeing = [other for other in passed if self._standing(other) in ("pass", "open")]
            return max([_rounded(rate / factor), settings.floor_per_s, *agreeing])
        failed = [r.rate_per_s for r in self._runs if r.rate_per_s > rate and r.outcome is RunOutcome.FAIL]
        agreeing = [other for other in failed if self._standing(other) in ("fail", "open")]
        return min([_rounded(rate * factor), settings.ceiling_per_s, *agreeing])

    def _stop_if_spoilt_again(self) -> None:
        last = self._runs[-1]
        tail = self._runs[-1 - RETRIES_OF_INVALID :]
        if len(tail) <= RETRIES_OF_INVALID or not all(run.is_spoilt for run in tail):
            return
        reason = "; ".join(last.reasons) or str(last.outcome)
        if last.outcome is RunOutcome.CLIENT:
            text = f"the client is the limit at {last.rate_per_s:g}/s, not the server: {reason}"
            self._stopped = Done(status="client_limit", reason=text)
        else:
            self._stopped = Done(status="invalid", reason=f"runs at {last.rate_per_s:g}/s are invalid: {reason}")

    def _end(self) -> Done:
        settings = self._settings
        if self._low is None:
            return Done(status="never_passes", reason=f"no rate passes down to {settings.floor_per_s:g}/s")
        if self._high is None:
            return Done(status="never_fails", reason=f"every rate passes up to {settings.ceiling_per_s:g}/s")
        return Done(status="found", reason=f"the limit lies between {self._low:g}/s and {self._high:g}/s")


def _rounded(rate_per_s: float) -> float:
    """Rates that people can read and repeat."""
    return float(f"{rate_per_s:.4g}")


def _first(verdict: RunVerdict, otherwise: str) -> str:
    return f"{verdict.reasons[0] if verdict.reasons else otherwise}; lengthen the run or lower the percentile"
