"""Where a sender leaves its records: JSON lines, in pieces small enough that no write holds the loop up."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

import msgspec

from tailrace.errors import ConfigError
from tailrace.measure.record import RequestRecord
from tailrace.workload.job import AnswerText, texts_path

_BUFFER_BYTES = 32 * 1024


class RowsOut:
    """A file of records, and beside it one of texts where they are kept."""

    def __init__(self, rows_path: str, *, keep_text: bool) -> None:
        """Raises ConfigError when the files cannot be written."""
        self._path = rows_path
        self._encode = msgspec.json.Encoder().encode
        self.num_records = 0
        self._texts: IO[bytes] | None = None
        self._rows = _open(rows_path)
        if keep_text:
            self._texts = _open(texts_path(rows_path))

    def write(self, record: RequestRecord, text: AnswerText | None = None) -> None:
        """Raises ConfigError, as when the disk is full."""
        with _said(self._path):
            self._rows.write(self._encode(record) + b"\n")
            self.num_records += 1
            if text is not None and self._texts is not None:
                self._texts.write(self._encode(text) + b"\n")

    def close(self) -> None:
        """Raises ConfigError when what is buffered cannot be written."""
        with _said(self._path):
            try:
                self._rows.close()
            finally:
                if self._texts is not None:
                    self._texts.close()


def _open(path: str) -> IO[bytes]:
    with _said(path):
        return open(path, "wb", buffering=_BUFFER_BYTES)


@contextmanager
def _said(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        text = error.strerror or str(error)
        raise ConfigError(f"{path} cannot be written: {text}; TMPDIR names another folder") from error
