"""Two results: what is refused, what a difference looks like, and when the data cannot tell."""

import math

import msgspec
import numpy as np
import pytest
from made_reports import latencies, report

from tailrace.errors import InvalidRequest
from tailrace.measure.combine import combine
from tailrace.measure.compare import Change, Comparison, compare
from tailrace.measure.intervals import to_float
from tailrace.measure.report import BenchResult
from tailrace.measure.slo import Limit, Slo


def result(
    num_runs: int = 3, *, first_seed: int = 0, scale: float = 100.0, num: int = 800, **changed: object
) -> BenchResult:
    runs = [report(latencies(first_seed + i, num, scale), f"run-{first_seed + i}", **changed) for i in range(num_runs)]
    return combine(runs, num_resamples=10)


def comparison(a: BenchResult, b: BenchResult, **options: bool) -> Comparison:
    return compare(a, b, num_resamples=200, **options)


def change(found: Comparison, name: str) -> Change:
    return next(each for each in found.percentiles + found.figures if each.name == name)


def test_a_slower_result_is_higher_with_an_interval_that_holds_the_ratio() -> None:
    found = comparison(result(), result(first_seed=10, scale=130.0))
    ttft = change(found, "ttft_ms_p50")
    assert ttft.finding == "higher"
    assert to_float(ttft.ratio_low) < 1.3 < to_float(ttft.ratio_high)
    assert to_float(ttft.difference_low) <= to_float(ttft.difference) <= to_float(ttft.difference_high)
    assert (ttft.num_a, ttft.num_b) == (2400, 2400)
    reverse = change(comparison(result(first_seed=10, scale=130.0), result()), "ttft_ms_p50")
    assert reverse.finding == "lower"


def test_results_of_one_thing_show_no_difference() -> None:
    found = comparison(result(), result(first_seed=10))
    assert change(found, "ttft_ms_p50").finding == "none shown"
    assert change(found, "ttft_ms_p99").finding == "none shown"
    assert change(found, "goodput_per_s").finding in ("none shown", "cannot tell")


def test_every_metric_has_the_usual_percentiles_and_those_of_the_slo() -> None:
    slo = "ttft_ms_p90<=900"
    names = [each.name for each in comparison(result(slo=slo), result(first_seed=10, slo=slo)).percentiles]
    assert names[:4] == ["ttft_ms_p50", "ttft_ms_p90", "ttft_ms_p95", "ttft_ms_p99"]
    assert len(names) == 13


def test_all_that_differs_is_named_at_once() -> None:
    other = result(
        first_seed=10, slo="ttft_ms_p99<=400", workload_sha256="ef" * 32, api="completions", ignore_eos=False
    )
    with pytest.raises(InvalidRequest, match=r"workload .*SLO .*API .*ignore_eos") as caught:
        comparison(result(), other)
    assert caught.value.message.count("workload") == 1


@pytest.mark.parametrize(("field", "value"), [("arrivals", "poisson:11"), ("num_clients", 4)])
def test_another_law_of_arrivals_is_refused(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match="not comparable"):
        comparison(result(), result(first_seed=10, **{field: value}))


def test_other_definitions_are_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"B was made with the definitions tailrace-measure/0"):
        comparison(result(), result(first_seed=10, definitions="tailrace-measure/0"))


def test_too_many_limits_are_refused_before_they_cost_a_bootstrap_each() -> None:
    made = result(1)
    slo = Slo(limits=tuple(Limit(metric="ttft_ms", percentile_ratio=i / 50, limit_ms=1) for i in range(1, 40)))
    run = msgspec.structs.replace(made.reports[0], info=msgspec.structs.replace(made.reports[0].info, slo=slo))
    with pytest.raises(InvalidRequest, match="B was judged by more than 32 limits"):
        comparison(made, msgspec.structs.replace(made, reports=[run]))


def test_another_engine_is_what_a_comparison_is_for() -> None:
    found = comparison(result(), result(first_seed=10, url="http://127.0.0.1:9", model="other"))
    assert (found.a.model, found.b.model) == ("smollm2", "other")
    assert any("they also differ in: model (smollm2 against other)" in note for note in found.notes)


def test_an_invalid_run_is_refused_unless_asked_for_and_then_noted() -> None:
    bad = result(first_seed=10, invalid=["client"])
    with pytest.raises(InvalidRequest, match="B run 1 invalid-client: client is wrong"):
        comparison(result(), bad)
    found = comparison(result(), bad, allow_invalid=True)
    assert sum("nothing here is a claim" in note for note in found.notes) == 3


def test_a_result_without_runs_is_refused() -> None:
    empty = msgspec.structs.replace(result(1), reports=[])
    with pytest.raises(InvalidRequest, match="A holds no run"):
        comparison(empty, result())


def test_few_samples_and_few_runs_are_said() -> None:
    found = comparison(result(1, num=100), result(4, first_seed=10))
    assert change(found, "ttft_ms_p99").finding == "cannot tell"
    assert change(found, "ttft_ms_p50").finding != "cannot tell"
    notes = " | ".join(found.notes)
    assert "A is one run" in notes
    assert "B has 4 runs" in notes
    assert "too few samples, or too many failures, to tell: ttft_ms_p99" in notes


def test_runs_that_are_not_steady_are_said() -> None:
    found = comparison(result(), result(first_seed=10, steady="drifting"))
    assert "B run 2: drifting, so its percentiles may depend on its length" in found.notes


def test_a_figure_of_single_runs_has_no_interval() -> None:
    single = change(comparison(result(1), result(1, first_seed=10)), "completed_per_s")
    assert (single.difference_low, single.difference_high, single.finding) == (None, None, "cannot tell")
    assert single.difference == pytest.approx(0.0)


def test_figures_of_runs_have_welchs_interval() -> None:
    def with_rates(rates: list[float], first_seed: int) -> BenchResult:
        made = result(len(rates), first_seed=first_seed)
        runs = [
            msgspec.structs.replace(run, rates=msgspec.structs.replace(run.rates, output_tokens_per_s=rate))
            for run, rate in zip(made.reports, rates, strict=True)
        ]
        return msgspec.structs.replace(made, reports=runs)

    found = change(comparison(with_rates([100, 102, 104], 0), with_rates([110, 112, 114], 10)), "output_tokens_per_s")
    # Equal variances of 4 over three runs each: half width t(0.975, 4) * sqrt(8 / 3).
    half = 2.7764451 * math.sqrt(8 / 3)
    assert found.difference == pytest.approx(10)
    assert found.difference_low == pytest.approx(10 - half)
    assert found.difference_high == pytest.approx(10 + half)
    assert found.ratio_low == pytest.approx(1 + (10 - half) / 102)
    assert found.finding == "higher"


def test_failures_are_infinite_and_two_infinities_tell_nothing() -> None:
    values = latencies(1, 800)
    values[::10] = math.inf
    failing = combine([report(np.array(values), f"run-{i}") for i in range(2)], num_resamples=10)
    found = comparison(result(2), failing)
    assert (change(found, "ttft_ms_p99").b, change(found, "ttft_ms_p99").finding) == ("inf", "higher")
    assert change(found, "failed_ratio").b == pytest.approx(0.1)
    both = change(comparison(failing, failing), "ttft_ms_p99")
    assert (both.difference, both.ratio, both.finding) == (None, None, "cannot tell")


def test_a_comparison_survives_json_and_its_seed_decides_it() -> None:
    found = comparison(result(), result(first_seed=10))
    assert msgspec.json.decode(msgspec.json.encode(found), type=Comparison) == found
    assert comparison(result(), result(first_seed=10)) == found
