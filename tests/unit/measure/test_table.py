"""Records as columns."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from measured_records import MS, failed, ns, record

from tailrace.errors import InvalidRequest
from tailrace.measure.record import Outcome, RequestRecord
from tailrace.measure.table import GAP_NS_MAX, MESSAGES_MAX, OUTCOMES, RecordTable


def test_columns_hold_what_the_records_say() -> None:
    rows = [
        record("a", 0, [10, 5, 7], [3, 1, 2]),
        failed("b", 20, message="no room"),
        record("c", 30, [4]),
    ]
    table = RecordTable.from_records(rows)
    assert len(table) == 3
    assert table.ok.tolist() == [True, False, True]
    assert table.chunks.starts.tolist() == [0, 3, 3, 4]
    assert table.chunks.gaps_ns.tolist() == [10 * MS, 5 * MS, 7 * MS, 4 * MS]
    assert table.chunks.tokens.tolist() == [3, 1, 2, 1]
    assert table.chunks.token_sums().tolist() == [6, 0, 1]
    assert table.chunks.first_tokens().tolist() == [3, 0, 1]
    assert table.chunks.stalls_ns().tolist() == [7 * MS, 0, 0]
    assert [table.messages[code] for code in table.message_codes] == ["", "no room", ""]
    assert table.known("first").tolist() == [True, False, True]
    assert table.time_ns("last")[[0, 2]].tolist() == [ns(22), ns(34)]


def test_absence_is_not_zero() -> None:
    table = RecordTable.from_records([record("a", 0, [1], num_cached_tokens=0), record("b", 0, [1])])
    assert table.known("num_cached_tokens").tolist() == [True, False]
    assert np.isnan(table.elapsed_ms("headers", "first")).all()


def test_no_records_make_an_empty_table() -> None:
    table = RecordTable.from_records([])
    assert len(table) == 0
    assert table.chunks.starts.tolist() == [0]
    assert list(table.chunks.instants(table.time_ns("scheduled"))) == []
    assert table.chunks.stalls_ns().tolist() == table.chunks.first_tokens().tolist() == []


def test_an_answer_that_ended_well_without_a_token_is_empty() -> None:
    table = RecordTable.from_records([record("a", 0, [])])
    assert not table.ok.any()
    assert OUTCOMES[table.outcome_codes[0]] is Outcome.EMPTY


def test_pieces_join_without_a_seam() -> None:
    rows = [record(str(i), i, [1.0] * (i % 4)) for i in range(20_000)]
    table = RecordTable.from_records(iter(rows))
    assert table.chunks.counts.tolist() == [i % 4 for i in range(20_000)]
    instants = np.concatenate([times for times, _ in table.chunks.instants(table.time_ns("scheduled"))])
    assert instants.tolist() == [ns(i + 1 + k) for i in range(20_000) for k in range(i % 4)]


def test_stall_of_the_last_request_is_found() -> None:
    table = RecordTable.from_records([record("a", 0, [9]), record("b", 0, [8, 1, 3])])
    assert table.chunks.stalls_ns().tolist() == [0, 3 * MS]


def test_messages_are_kept_up_to_a_bound() -> None:
    rows = [failed(str(i), 0, message=f"message {i} " + "x" * 1_000) for i in range(MESSAGES_MAX + 50)]
    table = RecordTable.from_records(rows)
    assert len(table.messages) == MESSAGES_MAX + 1
    assert max(map(len, table.messages)) <= 200
    assert table.messages[table.message_codes[-1]] == "other messages"


@pytest.mark.parametrize(
    "changes",
    [
        {"scheduled_ns": -1},
        {"scheduled_ns": 1 << 70},
        {"ended_ns": 1 << 62 | 1},
        {"chunk_gaps_ns": [-1]},
        {"chunk_gaps_ns": [1 << 80]},
        {"chunk_gaps_ns": [GAP_NS_MAX + 1]},
        {"chunk_gaps_ns": [1], "chunk_tokens": [0]},
        {"chunk_gaps_ns": [1], "chunk_tokens": [1, 1]},
        {"chunk_gaps_ns": [1, 1], "chunk_tokens": [1 << 30, 1 << 30]},
        {"chunk_gaps_ns": [1], "chunk_tokens": [1 << 40]},
        {"chunk_gaps_ns": [1], "chunk_tokens": [1 << 70]},
        {"num_output_tokens": -5},
        {"num_prompt_tokens": 1 << 64},
        {"turn": -1},
    ],
)
def test_a_record_that_cannot_be_is_refused_by_number(changes: dict[str, object]) -> None:
    good = [record(str(i), 0, [1, 2]) for i in range(2)]
    fields = {"request_id": "bad", "outcome": Outcome.OK, "scheduled_ns": 1, "ended_ns": 2} | changes
    bad = RequestRecord(**fields)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=r"^record 3: "):
        RecordTable.from_records([*good, bad, *good])


_GAPS = st.lists(st.integers(0, 10**9), max_size=6)


@given(st.lists(st.tuples(st.integers(0, 10**12), _GAPS), max_size=20))
def test_instants_equal_running_sums(drawn: list[tuple[int, list[int]]]) -> None:
    rows = [
        RequestRecord(request_id=str(i), outcome=Outcome.OK, scheduled_ns=at, ended_ns=at, chunk_gaps_ns=gaps)
        for i, (at, gaps) in enumerate(drawn)
    ]
    table = RecordTable.from_records(rows)
    expected = [at + sum(gaps[: k + 1]) for at, gaps in drawn for k in range(len(gaps))]
    assert [int(t) for times, _ in table.chunks.instants(table.time_ns("scheduled")) for t in times] == expected
    assert table.chunks.stalls_ns().tolist() == [max(gaps[1:], default=0) for _, gaps in drawn]
    assert [int(t) for t in table.time_ns("last")[table.known("last")]] == [at + sum(g) for at, g in drawn if g]


def test_a_chunk_may_have_many_tokens() -> None:
    table = RecordTable.from_records([record("a", 0, [10, 5], [300, 70_000]), record("b", 1, [10, 5])])
    assert table.chunks.tokens.tolist() == [300, 70_000, 1, 1]


@pytest.mark.parametrize("field", ["scheduled_ns", "ended_ns", "issued_ns", "num_output_tokens"])
def test_the_smallest_number_is_no_missing_one(field: str) -> None:
    with pytest.raises(InvalidRequest, match=f"record 2: {field} is negative"):
        RecordTable.from_records([record("a", 0, [10]), record("b", 0, [10], **{field: -(1 << 63)})])
