"""From the bytes of one answer to what its record says, however the bytes are cut."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_server import DONE, GOOD, event, words

from tailrace.measure.record import Outcome, TokenCount
from tailrace.workload.send.stream import PLAIN_BYTES_MAX, Answer
from tailrace.workload.send.token_counts import (
    count_chunks,
    merge_empty,
    share_by_length,
    tokens_per_chunk,
)


def read(*reads: bytes, keep_text: bool = False) -> Answer:
    """One read a nanosecond."""
    answer = Answer(keep_text=keep_text)
    answer.begin(200, "text/event-stream")
    for t_ns, data in enumerate(reads):
        answer.feed(t_ns, data)
    answer.finish()
    return answer


RICH = (
    event(choices=[{"delta": {"role": "assistant", "content": ""}}])
    + words("höh", "é", "✓")
    + b": comment\r\n\r\n"
    + event(choices=[{"delta": {"reasoning_content": "hm"}}])
    + event(choices=[{"delta": {}, "finish_reason": "stop"}], usage={"prompt_tokens": 3, "completion_tokens": 4})
    + DONE
)


@given(st.lists(st.integers(1, len(RICH) - 1), max_size=12))
def test_how_the_bytes_are_cut_changes_no_text_and_no_count(cuts: list[int]) -> None:
    ends = [0, *sorted(set(cuts)), len(RICH)]
    answer = read(*(RICH[a:b] for a, b in itertools.pairwise(ends)), keep_text=True)
    assert answer.outcome is Outcome.OK
    assert answer.texts == ["höh", "é", "✓", "hm"]
    assert answer.lengths == [3, 1, 1, 2]
    assert (answer.num_prompt_tokens, answer.num_output_tokens, answer.finish_reason) == (3, 4, "stop")
    assert answer.times_ns == sorted(answer.times_ns)


def test_an_event_counts_when_its_last_byte_has_come() -> None:
    first = words("one")
    assert read(first[:20], first[20:], DONE).times_ns == [1]
    assert read(words("one"), words("two", "three") + DONE).times_ns == [0, 1, 1]


@pytest.mark.parametrize("cut_short", [words("one", finish="length"), words("one")[:-1] + b"\r\n\r\n" + DONE, DONE])
def test_the_short_way_and_the_parser_agree(cut_short: bytes) -> None:
    plain_way = read(words("zero"), cut_short)
    parsed_way = Answer()
    parsed_way.begin(200, "text/event-stream")
    for t_ns, data in enumerate((words("zero"), cut_short)):
        for at in range(len(data)):
            parsed_way.feed(t_ns, data[at : at + 1])
    parsed_way.finish()
    assert parsed_way.lengths == plain_way.lengths
    assert parsed_way.outcome is plain_way.outcome


def test_reasoning_is_the_first_token_but_not_the_first_of_the_answer() -> None:
    thought = event(choices=[{"delta": {"reasoning": "let me see"}}])
    answer = read(thought, words("so"), DONE, keep_text=True)
    assert (answer.times_ns, answer.first_answer_ns, answer.answer_text) == ([0, 1], 1, "so")


def test_a_tool_call_is_text_that_the_model_wrote() -> None:
    call = event(choices=[{"delta": {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": "{}"}}]}}])
    answer = read(call, DONE)
    assert (answer.lengths, answer.first_answer_ns, answer.outcome) == ([3], 0, Outcome.OK)


def test_a_completion_streams_its_text() -> None:
    answer = read(event(choices=[{"index": 0, "text": "ab", "finish_reason": None}]), DONE)
    assert answer.lengths == [2]


def test_null_choices_and_unknown_fields_are_no_fault() -> None:
    answer = read(words("a"), event(choices=None, usage={"completion_tokens": 1, "total_tokens": 9}), DONE)
    assert (answer.outcome, answer.num_output_tokens) == (Outcome.OK, 1)


def test_cached_tokens_come_from_usage_or_from_the_timings_of_llama_server() -> None:
    usage = {"prompt_tokens": 10, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 8}}
    assert read(words("a"), event(choices=[], usage=usage), DONE).num_cached_tokens == 8
    timings = {"cache_n": 6, "prompt_n": 4, "predicted_n": 1, "predicted_ms": 1.5}
    answer = read(words("a"), event(choices=[], timings=timings), DONE)
    assert (answer.num_cached_tokens, answer.num_prompt_tokens, answer.num_output_tokens) == (6, 10, 1)


def test_usage_in_every_chunk_gives_exact_tokens_of_chunks() -> None:
    def chunk(text: str, so_far: int) -> bytes:
        return event(choices=[{"delta": {"content": text}}], usage={"completion_tokens": so_far})

    answer = read(chunk("", 0), chunk("ab", 2), chunk("c", 3), chunk("defg", 7), DONE)
    assert answer.running_totals == [2, 3, 7]
    assert answer.num_tokens_seen == 7
    counts = count_chunks(answer.lengths, answer.running_totals, answer.num_output_tokens, None)
    assert (counts.tokens, counts.source) == ([2, 1, 4], TokenCount.SERVER)


def test_a_count_that_stands_still_does_not_hide_chunks() -> None:
    first = event(choices=[{"delta": {"content": "a"}}], usage={"completion_tokens": 1})
    answer = read(first, words("b", "c"), DONE)
    assert answer.num_tokens_seen == 3


def test_lag_is_receipt_against_the_instant_in_the_chunk() -> None:
    answer = Answer()
    answer.begin(200, "text/event-stream")
    answer.feed(1_500, event(written_ns=1_200, choices=[{"delta": {"content": "a"}}]))
    assert answer.lags_ns == [300]


def test_an_answer_that_is_no_stream_is_kept_up_to_a_bound() -> None:
    answer = Answer()
    answer.begin(500, "application/json")
    for _ in range(100):
        answer.feed(0, b"x" * 10_000)
    assert answer._plain is not None
    assert len(answer._plain) == PLAIN_BYTES_MAX
    answer.finish()
    assert (answer.outcome, len(answer.message)) == (Outcome.FAILED, 300)


def test_nothing_counts_after_done() -> None:
    assert read(GOOD, words("more")).lengths == [3, 4, 6]


# Tokens of chunks


@pytest.mark.parametrize(
    ("lengths", "running", "total", "finish", "tokens", "source"),
    [
        ([4, 4, 4], [], 3, "length", None, TokenCount.SERVER),
        ([4, 4, 4], [], None, "length", None, TokenCount.UNKNOWN),
        ([4, 4, 4], [], 4, "stop", [1, 1, 2], TokenCount.SERVER),
        ([4, 4, 4], [], 4, "length", [2, 1, 1], TokenCount.LENGTH),
        ([3], [], 2, "stop", [2], TokenCount.SERVER),
        ([10, 1, 10], [], 9, "length", None, TokenCount.LENGTH),
        ([4, 4], [1, 2], 3, "stop", [1, 2], TokenCount.SERVER),
        ([4, 4], [1, 2], None, "stop", None, TokenCount.SERVER),
        ([4, 4], [5, 9], 9, "length", [5, 4], TokenCount.SERVER),
        ([4, 4], [5, 5], 9, "length", [5, 4], TokenCount.LENGTH),
        ([4, 4], [5], 2, "length", None, TokenCount.SERVER),
        ([4, 4], [5, 9], 8, "length", [4, 4], TokenCount.LENGTH),
        ([4, 4, 4], [], 0, "length", [0, 0, 0], TokenCount.LENGTH),
        ([], [], 0, "stop", None, TokenCount.SERVER),
    ],
)
def test_tokens_of_chunks_by_the_best_that_is_known(
    lengths: list[int], running: list[int], total: int | None, finish: str, tokens: list[int] | None, source: TokenCount
) -> None:
    counts = count_chunks(lengths, running, total, finish)
    assert counts.source is source
    if (lengths, total) == ([10, 1, 10], 9):
        assert counts.tokens is not None
        assert sum(counts.tokens) == 9
    else:
        assert counts.tokens == tokens


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 200))
def test_shares_by_length_sum_to_the_total_and_begin_with_a_token(lengths: list[int], total: int) -> None:
    shares = share_by_length(lengths, total)
    assert sum(shares) == total
    assert shares[0] >= 1
    assert min(shares) >= (1 if total >= len(lengths) else 0)


def test_a_token_belongs_to_the_chunk_that_completes_it() -> None:
    assert tokens_per_chunk([3, 6, 10], [2, 3, 7, 10]) == [2, 0, 2]
    assert tokens_per_chunk([3, 6], [4, 9]) == [0, 2]
    assert tokens_per_chunk([], [4]) == []


@given(st.lists(st.integers(1, 9), min_size=1, max_size=30), st.data())
def test_tokenised_chunks_lose_no_token(lengths: list[int], data: st.DataObject) -> None:
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    token_ends = sorted(data.draw(st.lists(st.integers(1, ends[-1]), max_size=60)))
    counts = tokens_per_chunk(ends, token_ends)
    for chunk, end in enumerate(ends):
        assert sum(counts[: chunk + 1]) == sum(token_end <= end for token_end in token_ends)


def test_the_gap_of_a_chunk_without_a_token_goes_to_the_next() -> None:
    assert merge_empty([5, 1, 2, 3], [1, 0, 0, 2]) == ([5, 6], [1, 2])


def test_a_bounded_message_of_any_bytes_is_printable() -> None:
    answer = Answer()
    answer.begin(200, "text/event-stream")
    answer.feed(0, b"data: " + json.dumps({"error": {"message": "\x1b[31m" + "x" * 5_000}}).encode() + b"\n\n")
    assert answer.outcome is Outcome.FAILED
    assert answer.message.isprintable()
    assert len(answer.message) == 300
