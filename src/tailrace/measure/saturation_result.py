"""What a search over rates found: the bracket, every run, and what the runs say together."""

from collections.abc import Sequence
from itertools import groupby
from typing import Literal

import msgspec
import numpy as np

from tailrace.measure.run_summary import RunOutcome, RunSummary
from tailrace.measure.statistics import isotonic_fit, monotone_p_value

Status = Literal[
    "found",
    "never_passes",
    "never_fails",
    "client_limit",
    "invalid",
    "too_few_samples",
    "runs_spent",
    "interrupted",
]

MONOTONE_P_MIN = 0.05
"""Below, passes and failures contradict "a higher rate is no easier" more than chance would."""
MONOTONE_DRAWS = 500


class ProbeResult(msgspec.Struct, frozen=True, kw_only=True):
    """One run of the search, in the order they were made."""

    rate_per_s: float
    purpose: str
    """`double`, `halve`, `bisect` or `confirm`."""
    outcome: RunOutcome
    summary: RunSummary
    reasons: list[str]

    @property
    def is_spoilt(self) -> bool:
        """It says nothing about the server, and counts for nothing."""
        return self.outcome in (RunOutcome.CLIENT, RunOutcome.INVALID)


class RateResult(msgspec.Struct, frozen=True, kw_only=True):
    """All valid runs at one rate."""

    rate_per_s: float
    num_runs: int
    num_passed: int
    num_steady: int
    attainment_ratio: float | None
    """Over the requests of these runs."""
    attainment_fit_ratio: float | None
    """Isotonic: the falling curve nearest to the attainments, each weighed by its requests."""


class SaturationResult(msgspec.Struct, frozen=True, kw_only=True):
    last_pass_per_s: float | None
    """None: no rate passed."""
    first_fail_per_s: float | None
    """None: none failed."""
    is_confirmed: bool
    """Nearly all fresh runs at each end agree with it."""
    status: Status
    is_monotone: bool
    monotone_p_value: float
    """See `statistics.monotone_p_value`."""
    rates: list[RateResult]
    """Ascending."""
    probes: list[ProbeResult]
    reasons: list[str]


def build_result(
    probes: Sequence[ProbeResult],
    *,
    last_pass_per_s: float | None,
    first_fail_per_s: float | None,
    is_confirmed: bool,
    status: Status,
    reason: str,
    seed: int,
) -> SaturationResult:
    rates = _rates(probes)
    p_value = (
        monotone_p_value(
            [rate.num_passed for rate in rates], [rate.num_runs for rate in rates], num_draws=MONOTONE_DRAWS, seed=seed
        )
        if rates
        else 1.0
    )
    reasons = [reason, *_remarks(probes, rates, is_confirmed, last_pass_per_s)]
    if p_value < MONOTONE_P_MIN:
        reasons.append(f"a higher rate did better than a lower one, and not by chance (p = {p_value:.2g})")
    return SaturationResult(
        last_pass_per_s=last_pass_per_s,
        first_fail_per_s=first_fail_per_s,
        is_confirmed=is_confirmed,
        status=status,
        is_monotone=p_value >= MONOTONE_P_MIN,
        monotone_p_value=p_value,
        rates=rates,
        probes=list(probes),
        reasons=reasons,
    )


def _rates(probes: Sequence[ProbeResult]) -> list[RateResult]:
    valid = sorted((probe for probe in probes if not probe.is_spoilt), key=lambda probe: probe.rate_per_s)
    groups = [(rate, list(runs)) for rate, runs in groupby(valid, key=lambda probe: probe.rate_per_s)]
    nums = np.array([sum(run.summary.num_requests for run in runs) for _, runs in groups], dtype=np.float64)
    attained = np.array([sum(run.summary.num_attained for run in runs) for _, runs in groups], dtype=np.float64)
    known = nums > 0
    shares = attained[known] / nums[known]
    fits = np.full(len(groups), np.nan)
    fits[known] = isotonic_fit(np.array([rate for rate, _ in groups])[known], shares, nums[known], rising=False)
    return [
        RateResult(
            rate_per_s=rate,
            num_runs=len(runs),
            num_passed=sum(run.outcome is RunOutcome.PASS for run in runs),
            num_steady=sum(run.summary.steadiness == "steady" for run in runs),
            attainment_ratio=float(attained[i] / nums[i]) if known[i] else None,
            attainment_fit_ratio=float(fits[i]) if known[i] else None,
        )
        for i, (rate, runs) in enumerate(groups)
    ]


def _remarks(
    probes: Sequence[ProbeResult], rates: Sequence[RateResult], is_confirmed: bool, last_pass: float | None
) -> list[str]:
    remarks = []
    if rates and not is_confirmed:
        remarks.append("the ends are not confirmed: fresh runs at them are missing or disagree")
    # A run too short to tell is `unknown`, which is no finding about the service.
    found = {p.rate_per_s for p in probes if not p.is_spoilt and p.summary.steadiness != "unknown"}
    unsteady = [rate for rate in rates if not rate.num_steady and rate.rate_per_s in found]
    if unsteady and len(unsteady) == len(rates):
        remarks.append("there is no steady state at any rate that was tried")
    elif unsteady:
        remarks.append(f"there is no steady state at {', '.join(f'{rate.rate_per_s:g}' for rate in unsteady)}/s")
    few = sorted({probe.rate_per_s for probe in probes if probe.outcome is RunOutcome.TOO_FEW})
    if few:
        remarks.append(
            f"a bound could not be known at {', '.join(f'{rate:g}' for rate in few)}/s, which does not count as a pass;"
            " a longer run may pass"
        )
    spoilt = [probe for probe in probes if probe.is_spoilt]
    if spoilt:
        remarks.append(f"{len(spoilt)} of {len(probes)} runs were invalid and count for nothing")
    if any(run.rate_per_s == last_pass and run.summary.little_agrees is False for run in probes):
        remarks.append(f"Little's law is off by more than 2 % in a run at {last_pass:g}/s")
    return remarks
