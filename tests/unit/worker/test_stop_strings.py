"""Hop 12: the text before a stop string is the same wherever its pieces are cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.worker.stop_strings import StopStrings

LETTERS = st.text(alphabet="ab🌊", max_size=14)
STOPS = st.lists(st.text(alphabet="ab🌊", min_size=1, max_size=4), max_size=3).map(tuple)


def reference(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """Reads on until some stop string has just ended; of those that end there the longest counts."""
    for end in range(len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            longest = max(ended, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(st.lists(LETTERS, max_size=8), STOPS)
def test_borders_of_pieces_change_nothing(pieces: list[str], stops: tuple[str, ...]) -> None:
    matcher = StopStrings(stops)
    out = "".join(matcher.push(piece) for piece in pieces) + matcher.flush()
    assert (out, matcher.hit) == reference("".join(pieces), stops)


@given(st.lists(LETTERS, max_size=8), STOPS)
def test_what_is_released_stays_true_whatever_comes_next(pieces: list[str], stops: tuple[str, ...]) -> None:
    matcher = StopStrings(stops)
    released = ""
    for i, piece in enumerate(pieces):
        released += matcher.push(piece)
        text = "".join(pieces[: i + 1])
        for rest in ("", *stops, *(stop[1:] for stop in stops)):
            assert reference(text + rest, stops)[0].startswith(released)


@pytest.mark.parametrize(
    ("pieces", "released"),
    [
        (["hel", "lo S", "T", "OP there"], ["hel", "lo ", "", ""]),
        (["S", "TO", "x"], ["", "", "STOx"]),
        (["SSTOP"], ["S"]),
        (["STSTO", "P"], ["ST", ""]),
    ],
)
def test_the_longest_possible_beginning_is_held_back(pieces: list[str], released: list[str]) -> None:
    matcher = StopStrings(("STOP",))
    assert [matcher.push(piece) for piece in pieces] == released


def test_nothing_comes_after_a_hit() -> None:
    matcher = StopStrings(("b",))
    assert matcher.push("abc") == "a"
    assert matcher.push("more") == ""
    assert matcher.flush() == ""
    assert matcher.hit == "b"


def test_without_stop_strings_nothing_is_held() -> None:
    assert StopStrings(()).push("text") == "text"
