import json
from pathlib import Path
from typing import Any

import pytest
from plan_sources import SIMPLE, drawn

from tailrace.clock import NS_PER_S
from tailrace.errors import ConfigError, InvalidRequest
from tailrace.workload import traces
from tailrace.workload.plan import PlannedTurn
from tailrace.workload.traces import read_trace

MOONCAKE = [
    {"timestamp": 3000, "input_length": 1300, "output_length": 52, "hash_ids": [0, 1, 2]},
    {"timestamp": 3105, "input_length": 1800, "output_length": 26, "hash_ids": [0, 1, 2, 3]},
    {"timestamp": 9000, "input_length": 1100, "output_length": 9, "hash_ids": [0, 4]},
]
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,Conversation log
110.5,GPT-4,417,505,922,API log
"""
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,4808,10
2023-11-16 18:15:50.9951691,3180,8
2023-11-16 18:15:47.1805900,110,27
"""
OWN = [
    {"at_s": 2.0, "prompt_tokens": 500, "output_tokens": 20, "group": "faq", "shared_tokens": 400},
    {"at_s": 1.5, "prompt_tokens": 30, "output_tokens": 10, "session": "s", "tenant": "t", "cohort": "c"},
    {"prompt_tokens": 40, "output_tokens": 11, "session": "s", "think_s": 4.0},
    {"at_s": 2.5, "prompt_tokens": 600, "output_tokens": 20, "group": "faq", "shared_tokens": 450},
]


def json_lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def trace(tmp_path: Path) -> Any:
    def write(content: str | bytes) -> str:
        path = tmp_path / "trace"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    return write


def refusal(path: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read_trace(path)
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 1_000
    return caught.value.message


def segments(turn: PlannedTurn) -> list[tuple[str, int]]:
    return [(part.key, part.num_tokens) for part in turn.user]


def test_mooncake_times_are_relative_and_blocks_are_of_512_tokens(trace: Any) -> None:
    read = read_trace(trace(json_lines(MOONCAKE)))
    assert read.layout == "mooncake"
    rows = [session[0] for session in read.sessions]
    assert [row.at_ns for row in rows] == [0, 105_000_000, 6 * NS_PER_S]
    assert rows[0].blocks == ((0, 512), (1, 512), (2, 276))
    assert rows[2].blocks == ((0, 512), (4, 512))
    assert read.declares_sharing


def test_mooncake_rows_declare_what_earlier_rows_sent(trace: Any) -> None:
    read = read_trace(trace(json_lines(MOONCAKE)))
    # Block 2 was seen with 276 of its tokens; what follows it is new.
    assert [session[0].shared_tokens for session in read.sessions] == [0, 512 + 512 + 276, 512]


def test_what_was_sent_before_goes_by_time_and_not_by_the_files_order(trace: Any) -> None:
    """Else the row that comes first in the file and later in time finds more in the cache than was declared."""
    row = {"input_length": 600, "output_length": 4, "hash_ids": [1, 2]}
    path = trace(json_lines([{"timestamp": 900, **row}, {"timestamp": 100, **row}]))
    assert [rows[0].shared_tokens for rows in read_trace(str(path)).sessions] == [0, 600]


def test_a_block_shared_in_the_trace_is_shared_text_in_the_run(trace: Any) -> None:
    plan = drawn(arrivals=f"trace:{trace(json_lines(MOONCAKE))}", warmup_s=0.0)
    turns = [plan.session(index).turns[0] for index in range(3)]
    assert segments(turns[0])[:2] == segments(turns[1])[:2] == [("run/block/0", 512), ("run/block/1", 512)]
    # 1,100 tokens with two hash ids: the rest is the request's own.
    assert segments(turns[2]) == [("run/block/0", 512), ("run/block/4", 512), ("run/2/0", 76)]
    assert [turn.num_prompt_tokens for turn in turns] == [1300, 1800, 1100]
    assert [turn.num_output_tokens for turn in turns] == [52, 26, 9]


def test_burstgpt_rows_without_an_answer_are_left_out_and_counted(trace: Any) -> None:
    read = read_trace(trace(BURSTGPT))
    assert read.layout == "burstgpt"
    rows = [session[0] for session in read.sessions]
    assert [(row.at_ns, row.prompt_tokens, row.output_tokens) for row in rows] == [
        (0, 472, 18),
        (105_500_000_000, 417, 505),
    ]
    assert read.notes == ("trace: 1 rows without prompt or output (failed requests) are left out",)
    assert not read.declares_sharing


def test_azure_times_keep_their_seventh_digit_and_are_put_in_order(trace: Any) -> None:
    read = read_trace(trace("\ufeff" + AZURE.replace("\n", "\r\n")))
    assert read.layout == "azure"
    rows = [session[0] for session in read.sessions]
    assert [(row.at_ns, row.prompt_tokens) for row in rows] == [(0, 4808), (500_000_000, 110), (4_314_579_100, 3180)]


def test_azure_times_with_a_zone_are_read(trace: Any) -> None:
    text = AZURE.splitlines()[0] + "\n2024-05-10 00:00:00.009930+00:00,1,1\n2024-05-10 01:00:01+01:00,1,1\n"
    assert [session[0].at_ns for session in read_trace(trace(text)).sessions] == [0, 990_070_000]


def test_columns_are_found_by_name_in_any_order(trace: Any) -> None:
    text = 'x,GeneratedTokens,"ContextTokens",TIMESTAMP\n"a,b",7,9,2023-11-16 18:15:46\n'
    row = read_trace(trace(text)).sessions[0][0]
    assert (row.prompt_tokens, row.output_tokens) == (9, 7)


def test_our_own_layout_has_groups_sessions_and_callers_that_leave(trace: Any) -> None:
    plan = drawn(arrivals=f"trace:{trace(json_lines(OWN))}", warmup_s=0.0)
    first, second, third = (plan.session(index) for index in range(3))
    assert [first.scheduled_ns, second.scheduled_ns, third.scheduled_ns] == [0, 500_000_000, NS_PER_S]
    assert (first.tenant, first.cohort, len(first.turns)) == ("t", "c", 2)
    assert first.turns[1].think_ns == 4 * NS_PER_S
    assert first.turns[1].num_shared_tokens == 30
    assert segments(second.turns[0]) == [("run/shared/faq", 400), ("run/1/0", 100)]
    assert segments(third.turns[0]) == [("run/shared/faq", 450), ("run/2/0", 150)]
    assert third.turns[0].num_shared_tokens == 450
    left = [*OWN[:1], {"at_s": 3, "prompt_tokens": 5, "output_tokens": 5, "cancel_after_tokens": 0}]
    plan = drawn(arrivals=f"trace:{trace(json_lines(left))}", warmup_s=0.0)
    assert plan.session(1).turns[0].cancel_after_tokens == 0


def test_a_faster_trace_has_the_same_lengths_and_shorter_gaps(trace: Any) -> None:
    path = trace(AZURE)
    plan, fast = (drawn(arrivals=f"trace:{path}{speed}", warmup_s=0.0) for speed in ("", "@2"))
    assert [plan.scheduled_ns(i) for i in range(3)] == [0, 500_000_000, 4_314_579_100]
    assert [fast.scheduled_ns(i) for i in range(3)] == [0, 250_000_000, 2_157_289_550]
    assert plan.session(2).turns == fast.session(2).turns
    assert plan.schedule_sha256 != fast.schedule_sha256
    assert plan.num_sessions == 3


def test_the_window_ends_with_the_trace_and_says_the_rate_in_it(trace: Any) -> None:
    path = trace(AZURE)
    plan = drawn(arrivals=f"trace:{path}", warmup_s=0.25, duration_s=60.0)
    gap_ns = 3_814_579_100  # from 0.5 s to the last arrival
    assert (plan.window_start_ns, plan.window_end_ns) == (250_000_000, 4_314_579_100 + gap_ns)
    assert plan.offered_per_s == pytest.approx(2 / (4.064579100 + 3.814579100))
    by_number = drawn(arrivals=f"trace:{path}", warmup_s=0.0, duration_s=None, num_requests=2)
    assert by_number.window_end_ns == 500_000_000 + gap_ns // 2 + 1  # the middle of the gap after the second


def test_a_file_is_read_once_and_again_when_it_changed(trace: Any) -> None:
    path = str(trace(AZURE))
    first = read_trace(path)
    assert read_trace(path) is first
    Path(path).write_text(AZURE + "2023-11-16 18:18:00.0000000,10,10\n", encoding="utf-8")
    assert len(read_trace(path).sessions) == len(first.sessions) + 1


def test_the_rate_of_a_trace_is_that_of_its_gaps_and_one_instant_is_no_infinite_rate(trace: Any) -> None:
    row = {"prompt_tokens": 30, "output_tokens": 4}
    even = trace(json_lines([{"at_s": second, **row} for second in range(5)]))
    assert drawn(arrivals=f"trace:{even}", warmup_s=0.0).offered_per_s == pytest.approx(1.0)
    burst = trace(json_lines([{"at_s": 7, **row}] * 5))
    assert drawn(arrivals=f"trace:{burst}", warmup_s=0.0).offered_per_s == pytest.approx(5.0)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"warmup_s": 60.0}, "ends 4.3 s after its start, within the warm-up"),
        ({"duration_s": None, "num_requests": 4, "warmup_s": 0.0}, "has 3 arrivals after the warm-up"),
        ({"duration_s": 1.0, "warmup_s": 1.0}, "no arrival in the window"),
    ],
)
def test_a_window_that_the_trace_cannot_fill_is_refused(trace: Any, changed: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        drawn(arrivals=f"trace:{trace(AZURE)}", **changed)


def test_the_hash_of_a_replay_is_of_its_rows_and_sampling(trace: Any) -> None:
    def hash_of(text: str, **given: Any) -> str:
        return drawn(arrivals=f"trace:{trace(text)}", warmup_s=0.0, **given).schedule_sha256

    hashes = [hash_of(AZURE), hash_of(AZURE.replace(",8\n", ",9\n")), hash_of(AZURE.replace("47.18", "47.19"))]
    hashes.append(hash_of(AZURE, workload_toml=SIMPLE + "[sampling]\ntemperature = 1.0"))
    assert len(set(hashes)) == 4
    assert hash_of(AZURE, run_id="other") == hashes[0]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "has no rows"),
        ("\n \n", "has no rows"),
        (b"\x80\x81\n", "not UTF-8"),
        ("a,b,c\n1,2,3\n", "line 1: 'a,b,c' begins no layout"),
        ('{"a": 1}\n', "line 1: its keys (a) are of no layout"),
        ("{\n", "line 1: not JSON"),
        ('{"a":' * 100_000, "line 1: not JSON"),
        ("x" * 500_000, "line 1: field larger than"),
        ("x" * 2_000_000, "line 1: the line is longer"),
        (json_lines(MOONCAKE) + "oops\n", "line 4: "),
        (json_lines(MOONCAKE) + '{"timestamp": 1}\n', "line 4: "),
        ('{"timestamp": -1, "input_length": 5, "output_length": 5}', "line 1: timestamp -1 must lie in"),
        ('{"timestamp": 1e300, "input_length": 5, "output_length": 5}', "line 1: timestamp 1e+300 must lie in"),
        ('{"timestamp": 1, "input_length": -5, "output_length": 5}', "line 1: input_length -5"),
        ('{"timestamp": 1, "input_length": 99999999999, "output_length": 5}', "line 1: input_length 99999999999"),
        ('{"timestamp": 1, "input_length": 5.5, "output_length": 5}', "line 1: Expected `int`"),
        ('{"timestamp": 1, "input_length": 5, "output_length": 5, "hash_ids": [1, 2]}', "line 1: 2 hash_ids are more"),
        (
            '{"timestamp": 1, "input_length": 5, "output_length": 5, "hash_ids": [99999999999999999999]}',
            "line 1: Expected `int`",
        ),
        ('{"at_s": 1, "prompt_tokens": 5, "output_tokens": 0}', "line 1: prompt_tokens and output_tokens must"),
        ('{"at_s": 1, "prompt_tokens": 5}', "line 1: missing key `output_tokens`"),
        ('{"at_s": 1, "prompt_tokens": 5, "output_tokens": 5, "out": 1}', "line 1: unknown key 'out'; the nearest"),
        ('{"prompt_tokens": 5, "output_tokens": 5}', "line 1: at_s is missing"),
        ('{"prompt_tokens": 5, "output_tokens": 5, "session": "s"}', "line 1: at_s is missing"),
        ('{"at_s": 1, "prompt_tokens": 5, "output_tokens": 5, "shared_tokens": 6}', "line 1: shared_tokens 6"),
        ('{"at_s": 1, "prompt_tokens": 5, "output_tokens": 5, "shared_tokens": 5}', "line 1: shared_tokens needs"),
        ('{"at_s": 1, "prompt_tokens": 5, "output_tokens": 5, "cancel_after_tokens": 5}', "line 1: cancel_after"),
        ('{"at_s": 1, "prompt_tokens": 5, "output_tokens": 5, "group": "' + "x" * 200 + '"}', "line 1: Expected `str`"),
        (json_lines(OWN) + '{"prompt_tokens":5,"output_tokens":5,"session":"s","shared_tokens":2}', "line 5: shared"),
        (AZURE + "2023-11-16 18:15:47,110\n", "line 5: 2 columns, fewer"),
        (AZURE + "yesterday,1,1\n", "line 5: TIMESTAMP 'yesterday' is not a date"),
        (AZURE + "0001-01-01 00:00:00,1,1\n", "spans more than"),
        (AZURE + "2023-11-16 18:15:47,1e3,1\n", "line 5: ContextTokens '1e3' is not a whole number"),
        (AZURE + "2023-11-16 18:15:47,-1,1\n", "line 5: ContextTokens '-1' is not a whole number"),
        (AZURE + '"2023,1,1\n', "line 5: "),
        (BURSTGPT + "nan,ChatGPT,1,1,2,API log\n", "line 5: Timestamp nan must lie in"),
        (BURSTGPT + "soon,ChatGPT,1,1,2,API log\n", "line 5: Timestamp 'soon' is not a number"),
        (BURSTGPT.splitlines()[0] + "\n", "no row with a prompt and an output"),
        (BURSTGPT.splitlines()[0] + "\n1,ChatGPT,9,0,9,API log\n", "no row with a prompt and an output"),
    ],
)
def test_a_hostile_trace_ends_in_one_line_that_says_where(trace: Any, content: str | bytes, said: str) -> None:
    assert said in refusal(trace(content))


@pytest.mark.parametrize("path", ["", "/", "a\0b", "/dev/zero"])
def test_what_is_no_file_is_refused(path: str) -> None:
    assert "trace" in refusal(path)


def test_rows_beyond_the_bound_are_left_out_and_said(trace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "ROWS_MAX", 2)
    read = read_trace(trace(AZURE))
    assert len(read.sessions) == 2
    assert read.notes == ("trace: only the first 2 rows are replayed",)


def test_blocks_beyond_the_bound_are_refused(trace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "BLOCKS_MAX", 6)
    assert "more than 6 hash_ids" in refusal(trace(json_lines(MOONCAKE)))
