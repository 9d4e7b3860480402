"""The record is a contract between client, gateway and simulator: what its JSON looks like is part of it."""

import msgspec
import pytest
from measured_records import record

from tailrace.measure.record import DEFINITIONS, Outcome, RequestRecord, TokenCount


def test_a_record_comes_back_from_json_unchanged() -> None:
    made = record("a", 3, [10, 2.5], [3, 1], token_count=TokenCount.LENGTH, cohort="long", turn=2, will_cancel=True)
    assert msgspec.json.decode(msgspec.json.encode(made), type=RequestRecord) == made


def test_what_was_not_observed_takes_no_room_in_json() -> None:
    bare = RequestRecord(request_id="a", outcome=Outcome.UNREACHABLE, scheduled_ns=1, ended_ns=2)
    assert msgspec.to_builtins(bare) == {
        "request_id": "a",
        "outcome": "unreachable",
        "scheduled_ns": 1,
        "ended_ns": 2,
    }


@pytest.mark.parametrize(
    "line", ['{"request_id":"a"}', '{"request_id":"a","outcome":"fine","scheduled_ns":1,"ended_ns":2}']
)
def test_a_record_without_an_end_or_with_another_outcome_is_refused(line: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(line, type=RequestRecord)


def test_definitions_carry_a_version() -> None:
    name, _, number = DEFINITIONS.partition("/")
    assert name == "tailrace-measure"
    assert int(number) >= 1
