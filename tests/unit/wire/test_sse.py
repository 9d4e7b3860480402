"""Hop 12: the parser gives the same events wherever the stream is cut."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.wire.sse import DONE, SseEvent, SseParser, encode_event

STREAM = (
    b"\xef\xbb\xbf: a comment\r\n\r\n"
    b'data: {"a": 1}\n\n'
    b"event: error\rdata: one\rdata: two\r\r"
    b"id: 7\r\ndata:no space\r\nretry: 5\r\n\r\n"
    b"data\n\n"
    b"\n\n"
    b"data: \xf0\x9f\x8c\x8a emoji\r\n\r\n" + DONE
)
EVENTS = [
    SseEvent('{"a": 1}'),
    SseEvent("one\ntwo", "error"),
    SseEvent("no space"),
    SseEvent(""),
    SseEvent("🌊 emoji"),
    SseEvent("[DONE]"),
]


def test_one_chunk_gives_every_event() -> None:
    assert SseParser().feed(STREAM) == EVENTS


@given(st.lists(st.integers(min_value=0, max_value=len(STREAM)), max_size=len(STREAM)))
def test_borders_of_chunks_change_nothing(cuts: list[int]) -> None:
    borders = [0, *sorted(cuts), len(STREAM)]
    parser = SseParser()
    events = []
    for start, end in itertools.pairwise(borders):
        events += parser.feed(STREAM[start:end])
    assert events == EVENTS


def test_single_bytes_give_every_event() -> None:
    parser = SseParser()
    assert [event for byte in STREAM for event in parser.feed(bytes([byte]))] == EVENTS


@given(st.binary(max_size=300), st.integers(min_value=1, max_value=7))
def test_any_bytes_are_survived_and_borders_do_not_matter(stream: bytes, size: int) -> None:
    parser = SseParser()
    cut = [event for at in range(0, len(stream), size) for event in parser.feed(stream[at : at + size])]
    assert cut == SseParser().feed(stream)


@given(st.text().filter(lambda text: "\n" not in text and "\r" not in text and "\ufeff" not in text))
def test_what_is_encoded_is_parsed(text: str) -> None:
    assert SseParser().feed(encode_event(text.encode())) == [SseEvent(text)]


def test_an_event_without_its_blank_line_is_not_given() -> None:
    assert SseParser().feed(b"data: half\n") == []


def test_only_the_done_event_is_done() -> None:
    done, other = SseParser().feed(DONE + b"data: [done]\n\n")
    assert done.is_done
    assert not other.is_done


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_an_endless_event_is_refused(end: bytes) -> None:
    chunk = b"data: " + b"x" * 1024 * 1024 + end
    parser = SseParser()
    for _ in range(15):
        parser.feed(chunk)
    with pytest.raises(ValueError, match="an event of more than"):
        parser.feed(chunk)
