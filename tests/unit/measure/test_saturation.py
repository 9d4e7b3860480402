"""The search for the highest rate, on simulated systems: each transition, and how often the bracket holds the truth."""

import math
from collections.abc import Callable

import pytest

from tailrace.clock import random_stream
from tailrace.errors import InvalidRequest
from tailrace.measure.run_summary import RunOutcome, RunSummary, RunVerdict
from tailrace.measure.saturation import Done, Probe, SaturationSearch, SaturationSettings
from tailrace.measure.saturation_result import SaturationResult

PASS, FAIL = RunOutcome.PASS, RunOutcome.FAIL
System = Callable[[Probe], RunOutcome]


def verdict(outcome: RunOutcome, rate: float, **changed: object) -> RunVerdict:
    summary = RunSummary(
        offered_per_s=rate,
        num_requests=1000,
        num_attained=995 if outcome is PASS else 900,
        **{"steadiness": "steady", **changed},
    )
    return RunVerdict(outcome=outcome, summary=summary, reasons=[f"it was a {outcome}"])


def search_with(system: System, seed: int = 1, **settings: float) -> SaturationSearch:
    """The finished search; a loop that does not end fails here."""
    search = SaturationSearch(SaturationSettings(**settings), seed)
    for _ in range(200):
        probe = search.next_probe()
        if isinstance(probe, Done):
            return search
        search.record(probe, verdict(system(probe), probe.rate_per_s))
    raise AssertionError("the search does not end")


def find(system: System, seed: int = 1, **settings: float) -> SaturationResult:
    return search_with(system, seed, **settings).result()


def sharp(limit: float) -> System:
    return lambda probe: PASS if probe.rate_per_s <= limit else FAIL


def noisy(limit: float, spread: float, seed: int) -> System:
    """The limit of each run varies by `spread` (standard deviation of its log)."""
    random = random_stream(seed, "simulated")
    return lambda probe: PASS if math.log(probe.rate_per_s / limit) <= spread * random.normal() else FAIL


def steps(result: SaturationResult, *purposes: str) -> list[tuple[float, str]]:
    return [(run.rate_per_s, str(run.outcome)) for run in result.probes if run.purpose in purposes]


def test_rates_double_until_a_run_fails_then_halve_on_the_log() -> None:
    result = find(sharp(10))
    assert steps(result, "double") == [(1, "pass"), (2, "pass"), (4, "pass"), (8, "pass"), (16, "fail")]
    assert steps(result, "bisect") == [(11.31, "fail"), (9.512, "pass"), (10.37, "fail")]
    assert (result.last_pass_per_s, result.first_fail_per_s) == (9.512, 10.37)
    assert (result.status, result.is_confirmed, result.is_monotone) == ("found", True, True)


def test_rates_halve_until_a_run_passes_when_the_first_fails() -> None:
    result = find(sharp(3), start_per_s=20.0)
    assert steps(result, "double", "halve") == [(20, "fail"), (10, "fail"), (5, "fail"), (2.5, "pass")]
    assert result.last_pass_per_s is not None
    assert result.first_fail_per_s is not None
    assert result.last_pass_per_s <= 3 < result.first_fail_per_s <= 1.101 * result.last_pass_per_s


def test_both_ends_get_five_fresh_runs_in_random_order() -> None:
    orders = [[rate for rate, _ in steps(find(sharp(10), seed), "confirm")] for seed in range(5)]
    assert all(sorted(order) == [9.512] * 5 + [10.37] * 5 for order in orders)
    assert len({tuple(order) for order in orders}) > 1
    assert find(sharp(10), 3) == find(sharp(10), 3)


def test_each_run_has_a_number_of_its_own_and_the_same_probe_until_it_is_answered() -> None:
    search = SaturationSearch(SaturationSettings(), 1)
    first = search.next_probe()
    assert first == search.next_probe() == Probe(number=0, rate_per_s=1.0, purpose="double")
    search.record(first, verdict(PASS, 1.0))
    assert search.next_probe() == Probe(number=1, rate_per_s=2.0, purpose="double")
    with pytest.raises(AssertionError, match="belongs to the probe"):
        search.record(first, verdict(PASS, 1.0))


@pytest.mark.parametrize(("limit", "spread"), [(10.0, 0.0), (10.0, 0.05), (37.0, 0.1), (0.3, 0.05), (5.0, 0.2)])
def test_the_bracket_holds_the_true_limit(limit: float, spread: float) -> None:
    results = [find(noisy(limit, spread, seed), seed) for seed in range(40)]
    inside = [(r.last_pass_per_s or 0.0) <= limit <= (r.first_fail_per_s or math.inf) for r in results]
    assert sum(inside) >= 36
    assert all(len(result.probes) <= 60 for result in results)


def test_one_contradiction_calls_for_more_runs_and_two_leave_a_rate_undecided() -> None:
    def contradicted(times: int) -> System:
        seen = {"left": times}

        def system(probe: Probe) -> RunOutcome:
            if probe.purpose == "confirm" and probe.rate_per_s == 9.512 and seen["left"]:
                seen["left"] -= 1
                return FAIL
            return sharp(10)(probe)

        return system

    once, twice = find(contradicted(1)), find(contradicted(2))
    assert [rate for rate, _ in steps(once, "confirm")].count(9.512) == 8
    assert (once.last_pass_per_s, once.is_confirmed) == (9.512, True)
    assert twice.last_pass_per_s is not None
    assert twice.last_pass_per_s < 9.512


def test_an_end_that_its_fresh_runs_contradict_moves_outward() -> None:
    # One lucky run at 16 while the limit is 10: the fresh runs say so.
    result = find(lambda probe: PASS if probe.rate_per_s <= 10 or probe.number == 4 else FAIL)
    assert result.probes[4].rate_per_s == 16
    assert result.last_pass_per_s is not None
    assert result.first_fail_per_s is not None
    assert result.last_pass_per_s <= 10 < result.first_fail_per_s <= 16
    assert result.is_confirmed


def test_an_unlucky_run_moves_the_upper_end_outward() -> None:
    result = find(lambda probe: PASS if probe.rate_per_s <= 10 and probe.number != 2 else FAIL)
    assert result.probes[2].rate_per_s == 4
    assert result.last_pass_per_s is not None
    assert result.first_fail_per_s is not None
    assert 4 < result.last_pass_per_s <= 10 < result.first_fail_per_s
    assert result.is_confirmed


def test_a_rate_at_which_fresh_runs_disagree_stays_inside_the_bracket() -> None:
    def system(probe: Probe) -> RunOutcome:
        if probe.purpose == "confirm" and probe.rate_per_s == 9.512:
            return PASS if probe.number % 2 else FAIL
        return PASS if probe.rate_per_s <= 10 else FAIL

    result = find(system)
    assert result.last_pass_per_s is not None
    assert result.last_pass_per_s < 9.512 < (result.first_fail_per_s or 0)
    assert result.is_confirmed


def test_a_reversal_is_bounded_and_said() -> None:
    # Above 30 it passes again: a limit that is none. The search ends, and the data contradict order.
    result = find(lambda probe: PASS if probe.rate_per_s <= 3 or probe.rate_per_s > 10 else FAIL, start_per_s=8.0)
    assert len(result.probes) <= 60
    assert result.last_pass_per_s is not None
    reversed_ends = find(
        lambda probe: PASS if (probe.purpose == "confirm") == (probe.rate_per_s > 10) else FAIL, ceiling_per_s=100.0
    )
    assert len(reversed_ends.probes) <= 60
    assert not reversed_ends.is_monotone
    assert any("a higher rate did better" in reason for reason in reversed_ends.reasons)


def test_no_rate_passes_down_to_the_floor() -> None:
    result = find(sharp(0.0), floor_per_s=0.2)
    assert [rate for rate, _ in steps(result, "double", "halve")] == [1.0, 0.5, 0.25, 0.2]
    assert (result.last_pass_per_s, result.first_fail_per_s) == (None, 0.2)
    assert (result.status, result.is_confirmed) == ("never_passes", True)
    assert "no rate passes down to 0.2/s" in result.reasons


def test_every_rate_passes_up_to_the_ceiling() -> None:
    result = find(sharp(math.inf), ceiling_per_s=5.0)
    assert [rate for rate, _ in steps(result, "double")] == [1, 2, 4, 5]
    assert (result.last_pass_per_s, result.first_fail_per_s) == (5.0, None)
    assert (result.status, result.is_confirmed) == ("never_fails", True)


@pytest.mark.parametrize("edge", ["floor", "ceiling"])
def test_an_edge_at_which_runs_disagree_ends_the_search(edge: str) -> None:
    limit = 0.0 if edge == "floor" else math.inf
    rate = 0.5 if edge == "floor" else 4.0

    def system(probe: Probe) -> RunOutcome:
        if probe.rate_per_s == rate and probe.purpose == "confirm":
            return PASS if probe.number % 2 else FAIL
        return sharp(limit)(probe)

    result = find(system, floor_per_s=0.5, ceiling_per_s=4.0)
    assert len(result.probes) < 40
    assert result.status in ("never_passes", "never_fails", "found")


def test_a_client_that_is_the_limit_stops_the_search_and_keeps_what_is_known() -> None:
    result = find(lambda probe: PASS if probe.rate_per_s < 6 else RunOutcome.CLIENT)
    assert result.status == "client_limit"
    assert (result.last_pass_per_s, result.first_fail_per_s, result.is_confirmed) == (4.0, None, False)
    assert "the client is the limit at 8/s, not the server" in result.reasons[0]
    assert steps(result, "double")[-2:] == [(8.0, "invalid-client")] * 2


def test_one_spoilt_run_is_made_again_and_counts_for_nothing() -> None:
    result = find(lambda probe: RunOutcome.CLIENT if probe.number in (3, 10) else sharp(10)(probe))
    assert (result.status, result.last_pass_per_s, result.first_fail_per_s) == ("found", 9.512, 10.37)
    assert sum(rate.num_runs for rate in result.rates) == len(result.probes) - 2
    assert any("2 of 20 runs were invalid" in reason for reason in result.reasons)


def test_runs_invalid_for_another_reason_stop_the_search_too() -> None:
    result = find(lambda _: RunOutcome.INVALID)
    assert (result.status, len(result.probes)) == ("invalid", 2)
    assert (result.last_pass_per_s, result.first_fail_per_s) == (None, None)
    assert result.rates == []


def test_a_bound_that_cannot_be_known_is_not_a_pass_and_lower_rates_are_not_tried() -> None:
    result = find(lambda _: RunOutcome.TOO_FEW)
    assert (result.status, len(result.probes)) == ("too_few_samples", 1)
    assert (result.last_pass_per_s, result.first_fail_per_s) == (None, None)
    assert "lengthen the run" in result.reasons[0]
    later = find(lambda probe: PASS if probe.rate_per_s <= 10 else RunOutcome.TOO_FEW)
    assert (later.status, later.last_pass_per_s, later.first_fail_per_s) == ("found", 9.512, 10.37)
    assert any("a bound could not be known at 10.37, 11.31, 16/s" in reason for reason in later.reasons)


def test_the_runs_are_bounded_and_an_end_that_was_not_tried_is_not_reported() -> None:
    spent = find(sharp(10), runs_max=7)
    assert (spent.status, len(spent.probes), spent.is_confirmed) == ("runs_spent", 7, False)
    assert any("not confirmed" in reason for reason in spent.reasons)
    # 8 passes once and then never: after its fresh runs the lower end moves to a rate without a run.
    lucky = find(lambda probe: PASS if probe.number == 0 else FAIL, start_per_s=8.0, runs_max=12)
    assert lucky.last_pass_per_s is None or lucky.last_pass_per_s in {run.rate_per_s for run in lucky.probes}


def test_an_interrupted_search_has_a_result() -> None:
    search = SaturationSearch(SaturationSettings(), 1)
    assert search.result().status == "interrupted"
    probe = search.next_probe()
    assert isinstance(probe, Probe)
    search.record(probe, verdict(PASS, 1.0))
    assert (search.result().last_pass_per_s, search.result().first_fail_per_s) == (1.0, None)


def test_the_fit_of_attainment_falls_with_the_rate() -> None:
    result = find(noisy(10, 0.2, 3), 3)
    assert [rate.rate_per_s for rate in result.rates] == sorted(rate.rate_per_s for rate in result.rates)
    fits = [rate.attainment_fit_ratio or 0.0 for rate in result.rates]
    assert fits == sorted(fits, reverse=True)
    assert all(rate.attainment_ratio is not None for rate in result.rates)


def test_runs_too_short_to_tell_are_no_missing_steady_state() -> None:
    search = SaturationSearch(SaturationSettings(floor_per_s=1.0), 1)
    while isinstance(probe := search.next_probe(), Probe):
        search.record(probe, verdict(FAIL, probe.rate_per_s, steadiness="unknown"))
    assert not any("steady state" in reason for reason in search.result().reasons)


def test_missing_steadiness_and_little_are_said() -> None:
    search = SaturationSearch(SaturationSettings(floor_per_s=1.0), 1)
    while isinstance(probe := search.next_probe(), Probe):
        search.record(probe, verdict(FAIL, probe.rate_per_s, steadiness="saturated"))
    assert "there is no steady state at any rate that was tried" in search.result().reasons
    search = SaturationSearch(SaturationSettings(), 1)
    while isinstance(probe := search.next_probe(), Probe):
        outcome = sharp(10)(probe)
        steadiness = "steady" if outcome is PASS else "saturated"
        search.record(probe, verdict(outcome, probe.rate_per_s, steadiness=steadiness, little_agrees=False))
    reasons = search.result().reasons
    assert "there is no steady state at 10.37, 11.31, 16/s" in reasons
    assert "Little's law is off by more than 2 % in a run at 9.512/s" in reasons


@pytest.mark.parametrize(
    "settings",
    [
        {"start_per_s": 0.0},
        {"start_per_s": math.nan},
        {"floor_per_s": 2.0},
        {"ceiling_per_s": 0.5},
        {"ceiling_per_s": math.inf},
        {"resolution_ratio": 1.0},
        {"confirm_runs": 4},
        {"runs_max": 0},
    ],
)
def test_settings_without_sense_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(InvalidRequest):
        SaturationSearch(SaturationSettings(**settings), 1)
