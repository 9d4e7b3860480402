"""What is printed."""

import pytest

from tailrace.cli.backend import Turn, statistics_line
from tailrace.cli.output import GIB, MIB, size, table


def test_a_table_is_as_wide_as_its_widest_cells() -> None:
    assert table(["a", "n"], [["long", "1"], ["b", "22"]], right=frozenset({1})) == "a      n\nlong   1\nb     22"


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0.0 MiB"), (MIB, "1.0 MiB"), (GIB, "1.00 GiB"), (1536 * GIB, "1,536.00 GiB")]
)
def test_sizes_are_readable(num_bytes: int, text: str) -> None:
    assert size(num_bytes) == text


def test_statistics_leave_out_what_is_not_known() -> None:
    assert statistics_line(Turn(text="", finish_reason=None)) == "stop reason unknown"


def test_the_rate_is_that_of_the_tokens_after_the_first() -> None:
    turn = Turn(text="x", finish_reason="stop", num_output_tokens=11, ttft_ns=10**9, duration_ns=3 * 10**9)
    assert turn.tokens_per_s == 5.0
    assert statistics_line(turn) == "11 tokens, stop reason stop, TTFT 1,000 ms, 5.0 tokens/s"


def test_one_token_has_no_rate() -> None:
    turn = Turn(text="x", finish_reason="stop", num_output_tokens=1, ttft_ns=10, duration_ns=20)
    assert turn.tokens_per_s is None
