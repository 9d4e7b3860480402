import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from plan_sources import SIMPLE, drawn

from tailrace.clock import NS_PER_S
from tailrace.errors import ConfigError, InvalidRequest
from tailrace.workload.arrivals import Paced, Schedule
from tailrace.workload.plan import Plan, PlannedSession

SHARED = """
name = "shared"
[[cohorts]]
prompt_tokens = { law = "constant", value = 60 }
output_tokens = { law = "constant", value = 48 }
[cohorts.shared_prefix]
num_groups = 4
tokens = { law = "uniform", low = 100, high = 900 }
zipf_exponent = 1.0
"""
TURNS = """
name = "turns"
[[cohorts]]
prompt_tokens = { law = "uniform", low = 10, high = 90 }
output_tokens = { law = "constant", value = 20 }
num_turns = { law = "constant", value = 3 }
think_s = { law = "exponential", mean = 5 }
[cohorts.shared_prefix]
tokens = { law = "constant", value = 200 }
"""


def cancelling(ratio: float, after: int) -> str:
    return SIMPLE + (
        f"[cohorts.cancellation]\nshare_ratio = {ratio}\nafter_tokens = {{ law = 'constant', value = {after} }}\n"
    )


def sessions(plan: Plan, num: int) -> list[PlannedSession]:
    return [plan.session(index) for index in range(num)]


def keys(found: list[PlannedSession]) -> list[str]:
    return [part.key for one in found for turn in one.turns for part in turn.system + turn.user]


@pytest.mark.parametrize("arrivals", ["poisson:10", "constant:10", "gamma:10:2", "closed:3"])
def test_two_processes_draw_the_same_plan_in_any_order(arrivals: str) -> None:
    one, other = drawn(arrivals=arrivals), drawn(arrivals=arrivals)
    forward = [one.session(index) for index in range(50)]
    backward = [other.session(index) for index in reversed(range(50))]
    assert forward == backward[::-1]
    assert one.schedule_sha256 == other.schedule_sha256


def test_a_sessions_content_does_not_depend_on_arrivals_or_window() -> None:
    open_one = sessions(drawn(), 20)
    closed_one = sessions(drawn(arrivals="closed:2", duration_s=None, num_requests=5, warmup_s=0.0), 20)
    assert [one.turns for one in open_one] == [one.turns for one in closed_one]


def test_neighbouring_seeds_and_indices_draw_apart() -> None:
    lengths = {seed: [one.turns[0].num_prompt_tokens for one in sessions(drawn(seed=seed), 200)] for seed in (1, 2)}
    assert sum(a == b for a, b in zip(lengths[1], lengths[2], strict=True)) < 20
    assert len(set(lengths[1])) > 50


def test_lengths_follow_the_law_over_sessions() -> None:
    lengths = [one.turns[0].num_prompt_tokens for one in sessions(drawn(), 4_000)]
    assert min(lengths) == 10
    assert max(lengths) == 90
    assert sum(lengths) / len(lengths) == pytest.approx(50, abs=1.5)


def test_a_window_by_time_begins_after_the_warm_up() -> None:
    plan = drawn(duration_s=20.0, warmup_s=2.0)
    assert (plan.window_start_ns, plan.window_end_ns) == (2 * NS_PER_S, 22 * NS_PER_S)
    assert plan.num_window_requests is None
    assert plan.num_clients is None


def test_a_window_by_number_ends_in_the_middle_of_the_gap_after_its_last_arrival() -> None:
    plan = drawn(arrivals="constant:10", duration_s=None, num_requests=25, warmup_s=2.0)
    inside = [
        index
        for index in range(200)
        if plan.window_start_ns <= (plan.scheduled_ns(index) or 0) < (plan.window_end_ns or 0)
    ]
    assert len(inside) == 25
    # The arrival at exactly 2 s is the first of them.
    assert plan.scheduled_ns(inside[0]) == 2 * NS_PER_S
    assert plan.window_end_ns == (plan.scheduled_ns(inside[-1]) or 0) + NS_PER_S // 20 + 1


def test_load_goes_on_after_the_window_by_the_same_law() -> None:
    plan = drawn(arrivals="constant:10", duration_s=1.0, warmup_s=0.0)
    assert plan.num_sessions is None
    schedule = Schedule(Paced(10.0), 1)
    assert [plan.scheduled_ns(index) for index in range(20_000, 20_010)] == [
        schedule.instant_ns(index) for index in range(20_000, 20_010)
    ]


def test_a_closed_loop_has_clients_and_no_instants() -> None:
    plan = drawn(arrivals="closed:3", duration_s=None, num_requests=10)
    assert (plan.num_clients, plan.num_window_requests, plan.window_end_ns) == (3, 10, None)
    assert plan.scheduled_ns(0) is None
    assert plan.session(0).scheduled_ns is None
    assert plan.offered_per_s is None
    assert drawn(arrivals="closed:3").window_end_ns == 22 * NS_PER_S


def test_the_offered_rate_counts_requests_where_arrivals_count_sessions() -> None:
    assert drawn(arrivals="poisson:10").offered_per_s == 10
    assert drawn(arrivals="poisson:10", workload_toml=TURNS).offered_per_s == pytest.approx(30)


def test_no_two_requests_and_no_two_runs_share_text_unless_declared() -> None:
    plans = [drawn(run_id=run_id, workload_toml=SIMPLE) for run_id in ("a", "b")]
    found = [key for plan in plans for key in keys(sessions(plan, 300))]
    assert len(set(found)) == len(found)
    assert not any(plan.declares_sharing for plan in plans)


def test_a_group_shares_its_prefix_within_the_run_and_not_beyond() -> None:
    found = sessions(drawn(run_id="a", workload_toml=SHARED), 200)
    by_group: dict[str, set[object]] = {}
    for one in found:
        turn = one.turns[0]
        by_group.setdefault(one.group, set()).add(turn.user[0])
        assert turn.num_shared_tokens == turn.user[0].num_tokens
        assert turn.num_prompt_tokens == turn.user[0].num_tokens + 60
    assert len(by_group) == 4
    assert all(len(prefixes) == 1 for prefixes in by_group.values()), "one length and one key a group"
    own = [one.turns[0].user[1].key for one in found]
    assert len(set(own)) == len(own)
    assert not set(keys(found)) & set(keys(sessions(drawn(run_id="b", workload_toml=SHARED), 200)))
    assert drawn(workload_toml=SHARED).declares_sharing


def test_groups_lengths_stay_when_only_the_run_changes() -> None:
    shared = [
        {one.group: one.turns[0].num_shared_tokens for one in sessions(drawn(run_id=run, workload_toml=SHARED), 100)}
        for run in ("a", "b")
    ]
    assert shared[0] == shared[1]


def test_popularity_of_groups_follows_zipf() -> None:
    counts = Counter(one.group for one in sessions(drawn(workload_toml=SHARED), 4_000))
    expected = [4_000 / rank / sum(1 / r for r in (1, 2, 3, 4)) for rank in (1, 2, 3, 4)]
    assert [counts[f"{number}"] for number in range(4)] == pytest.approx(expected, rel=0.12)


def test_a_shared_prefix_can_be_a_system_message() -> None:
    turn = drawn(workload_toml=SHARED + 'role = "system"\n').session(0).turns[0]
    assert len(turn.system) == len(turn.user) == 1
    assert turn.num_shared_tokens == turn.system[0].num_tokens


def test_later_turns_wait_and_declare_what_earlier_ones_asked() -> None:
    for one in sessions(drawn(workload_toml=TURNS), 20):
        assert len(one.turns) == 3
        assert one.turns[0].think_ns == 0
        assert all(turn.think_ns > 0 for turn in one.turns[1:])
        assert one.turns[0].num_shared_tokens == 200
        asked = [turn.num_prompt_tokens for turn in one.turns]
        assert [turn.num_shared_tokens for turn in one.turns[1:]] == list(itertools.accumulate(asked))[:2]
        assert len({turn.request_id for turn in one.turns}) == 3


def test_cohorts_come_by_weight_and_bring_their_tenant() -> None:
    text = """
name = "mixed"
[[cohorts]]
name = "a"
weight = 9
tenant = "t1"
prompt_tokens = { law = "constant", value = 5 }
output_tokens = { law = "constant", value = 5 }
[[cohorts]]
name = "b"
tenant = "t2"
prompt_tokens = { law = "constant", value = 50 }
output_tokens = { law = "constant", value = 5 }
"""
    found = sessions(drawn(workload_toml=text), 4_000)
    counts = Counter((one.cohort, one.tenant, one.turns[0].num_prompt_tokens) for one in found)
    assert set(counts) == {("a", "t1", 5), ("b", "t2", 50)}
    assert counts[("b", "t2", 50)] == pytest.approx(400, rel=0.2)


def test_the_declared_share_of_callers_leaves_before_the_end() -> None:
    found = [one.turns[0].cancel_after_tokens for one in sessions(drawn(workload_toml=cancelling(0.25, 3)), 4_000)]
    assert Counter(found)[3] == pytest.approx(1_000, rel=0.12)
    assert set(found) == {None, 3}
    late = drawn(workload_toml=cancelling(1, 500)).session(0).turns[0]
    assert late.cancel_after_tokens == late.num_output_tokens - 1
    assert drawn(workload_toml=cancelling(1, 0)).session(0).turns[0].cancel_after_tokens == 0


def test_a_conversation_ends_with_the_turn_that_is_left() -> None:
    text = TURNS.replace(
        "[cohorts.shared_prefix]", "[cohorts.cancellation]\nshare_ratio = 0.5\n[cohorts.shared_prefix]"
    )
    for one in sessions(drawn(workload_toml=text), 100):
        assert all(turn.cancel_after_tokens is None for turn in one.turns[:-1])
        assert one.turns[-1].cancel_after_tokens is not None or len(one.turns) == 3


@pytest.mark.parametrize(
    "changed",
    [
        {"seed": 2},
        {"arrivals": "poisson:11"},
        {"arrivals": "closed:2"},
        {"duration_s": 21.0},
        {"warmup_s": 3.0},
        {"workload_toml": SIMPLE.replace("value = 7", "value = 8")},
    ],
)
def test_the_schedules_hash_changes_with_whatever_changes_the_load(changed: dict[str, Any]) -> None:
    assert drawn(**changed).schedule_sha256 != drawn().schedule_sha256


def test_the_schedules_hash_is_that_of_the_load_and_not_of_the_run() -> None:
    assert drawn(run_id="other").schedule_sha256 == drawn().schedule_sha256


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"duration_s": None}, "--duration or --requests"),
        ({"num_requests": 4}, "--duration or --requests"),
        ({"duration_s": 0.0}, "more than 0"),
        ({"duration_s": float("nan")}, "must lie in"),
        ({"warmup_s": -1.0}, "--warmup -1"),
        ({"warmup_s": 1e9}, "--warmup 1e+09"),
        ({"duration_s": None, "num_requests": 0}, "--requests 0"),
        ({"arrivals": "poisson:100000", "duration_s": 100_000.0}, "lower rate or a shorter run"),
        ({"arrivals": "poisson:0.001", "duration_s": None, "num_requests": 10_000_000}, "higher rate or fewer"),
        ({"arrivals": "lots"}, "--arrivals 'lots'"),
    ],
)
def test_a_run_that_cannot_be_is_refused_in_one_line(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        drawn(**changed)
    assert said in caught.value.message


def test_a_wrong_workload_or_a_missing_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown key"):
        drawn(workload_toml=SIMPLE + "x = 1")
    with pytest.raises(ConfigError, match="no trace file"):
        drawn(arrivals=f"trace:{tmp_path / 'none'}")
