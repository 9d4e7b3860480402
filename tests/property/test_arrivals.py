"""Laws of schedules, for any law, seed and way of asking."""

from hypothesis import given
from hypothesis import strategies as st

from tailrace.workload.arrivals import Gamma, OpenLaw, Paced, Poisson, Schedule

RATES = st.floats(0.01, 10_000)
LAWS: st.SearchStrategy[OpenLaw] = st.one_of(
    st.builds(Poisson, RATES), st.builds(Paced, RATES), st.builds(Gamma, RATES, st.floats(0.1, 4))
)
SEEDS = st.integers(0, 2**64 - 1)


@given(law=LAWS, seed=SEEDS, asked=st.lists(st.integers(1, 12_000), min_size=1, max_size=5))
def test_a_longer_schedule_begins_like_a_shorter_one_however_it_is_asked_for(
    law: OpenLaw, seed: int, asked: list[int]
) -> None:
    at_once = Schedule(law, seed).instants_ns(0, max(asked))
    piecewise = Schedule(law, seed)
    for num_arrivals in asked:
        assert (piecewise.instants_ns(0, num_arrivals) == at_once[:num_arrivals]).all()


@given(law=LAWS, seed=SEEDS)
def test_instants_never_fall_and_none_lies_before_zero(law: OpenLaw, seed: int) -> None:
    instants = Schedule(law, seed).instants_ns(0, 9_000)
    assert instants[0] >= 0
    assert (instants[1:] >= instants[:-1]).all()


@given(law=LAWS, seed=SEEDS, index=st.integers(0, 6_000))
def test_finding_an_instant_is_the_inverse_of_asking_for_it(law: OpenLaw, seed: int, index: int) -> None:
    schedule = Schedule(law, seed)
    instant = schedule.instant_ns(index)
    found = schedule.first_at_or_after(instant)
    assert found <= index
    assert schedule.instant_ns(found) == instant
    assert found == 0 or schedule.instant_ns(found - 1) < instant
