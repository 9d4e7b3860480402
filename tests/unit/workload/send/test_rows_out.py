"""Records that cannot be kept end the run with a line that names the file."""

import pytest

from tailrace.errors import ConfigError
from tailrace.measure.record import Outcome, RequestRecord
from tailrace.workload.send.rows_out import RowsOut


def test_a_full_disk_is_said_in_one_line_with_its_file() -> None:
    rows = RowsOut("/dev/full", keep_text=False)
    record = RequestRecord(
        request_id="r" * 1_000, scheduled_ns=0, outcome=Outcome.OK, ended_ns=1, num_output_tokens_asked=1,
        num_prompt_tokens_asked=1,
    )  # fmt: skip
    said = "^/dev/full cannot be written: No space left on device; TMPDIR names another folder$"

    def write_more_than_a_buffer() -> None:
        for _ in range(1_000):
            rows.write(record)

    with pytest.raises(ConfigError, match=said):
        write_more_than_a_buffer()
    with pytest.raises(ConfigError, match=said):
        rows.close()
