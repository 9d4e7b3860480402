"""What is printed."""

import pytest

from tailrace.cli.backend import Turn, statistics_line
from tailrace.cli.output import ProgressLine, table


def test_a_table_is_as_wide_as_its_widest_cells() -> None:
    assert table(["a", "n"], [["long", "1"], ["b", "22"]], right=frozenset({1})) == "a      n\nlong   1\nb     22"


def test_statistics_leave_out_what_is_not_known() -> None:
    assert statistics_line(Turn(text="", finish_reason=None)) == "stop reason unknown"


def test_the_rate_is_that_of_the_tokens_after_the_first() -> None:
    turn = Turn(text="x", finish_reason="stop", num_output_tokens=11, ttft_ns=10**9, duration_ns=3 * 10**9)
    assert turn.tokens_per_s == 5.0
    assert statistics_line(turn) == "11 tokens, stop reason stop, TTFT 1,000 ms, 5.0 tokens/s"


def test_one_token_has_no_rate() -> None:
    turn = Turn(text="x", finish_reason="stop", num_output_tokens=1, ttft_ns=10, duration_ns=20)
    assert turn.tokens_per_s is None


def test_progress_outside_a_terminal_is_one_line_a_phase(capsys: pytest.CaptureFixture[str]) -> None:
    progress = ProgressLine()
    for text, detail in [("a", "0%"), ("a", "50%"), ("b", "0%")]:
        progress.show(text, detail)
    progress.done()
    assert capsys.readouterr().err == "a\nb\n"
