"""The client's own count of output tokens, after the run: the joined text of each answer through a pinned tokenizer.

In: a sender's rows and the texts beside them. Out: the same rows with `num_output_tokens_client`, and with tokens a
chunk where the server did not tell them. Nothing is tokenised while load is sent.
"""

import asyncio
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, Protocol, TypeVar

import msgspec
from tokenizers import Tokenizer

from tailrace.errors import ConfigError
from tailrace.measure.record import RequestRecord, TokenCount
from tailrace.model.gguf_file import open_gguf
from tailrace.model.gguf_tokenizer import tokenizer_json
from tailrace.model.source import find_model
from tailrace.workload.job import AnswerText, Endpoint, texts_path
from tailrace.workload.send.token_counts import retokenised

BATCH = 512
FILE_BYTES_MAX = 256 * 1024 * 1024
_T = TypeVar("_T")


class PinnedTokenizer:
    """A tokenizer from a file, with the hash of what it was made from. Text that looks like a special token is text."""

    def __init__(self, content: bytes, name: str) -> None:
        """`content`: tokenizer.json. Raises ConfigError."""
        try:
            self._tokenizer = Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises a bare Exception
            raise ConfigError(f"the tokenizer {name} cannot be read: {error}", param="tokenizer") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        self.name = name
        self.sha256 = hashlib.sha256(content).hexdigest()

    def counts(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each text, without those that a template would add."""
        return [len(e) for e in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def token_ends(self, texts: Sequence[str]) -> list[list[int]]:
        """Where each token ends, in characters of its text."""
        encoded = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [[end for _, end in encoding.offsets] for encoding in encoded]


class Recount(Protocol):
    """Counts the output of a finished run again."""

    async def __call__(self, rows_paths: Sequence[str], endpoint: Endpoint) -> list[str]:
        """Rewrites the files of rows. Returns notes for the report."""
        ...


class LocalRecount:
    """With a tokenizer of this host."""

    def __init__(self, tokenizer: PinnedTokenizer) -> None:
        self._tokenizer = tokenizer

    async def __call__(self, rows_paths: Sequence[str], endpoint: Endpoint) -> list[str]:  # noqa: ARG002
        for path in rows_paths:
            await asyncio.to_thread(recount, path, self._tokenizer)
        return [f"output tokens were counted again with {self._tokenizer.name}, sha256 {self._tokenizer.sha256}"]


def recount_with(spec: str) -> Recount:
    """`endpoint`, or what `open_tokenizer` takes."""
    from tailrace.workload.run.endpoint_count import EndpointRecount  # it reads rows as this module does

    return EndpointRecount() if spec == "endpoint" else LocalRecount(open_tokenizer(spec))


def open_tokenizer(spec: str) -> PinnedTokenizer:
    """Of a tokenizer.json, a directory with one, a GGUF file or a packaged model. Raises ConfigError, ModelSourceError
    or ModelRefused."""
    path = Path(spec).expanduser()
    if path.is_dir():
        path /= "tokenizer.json"
    if path.suffix == ".json":
        return PinnedTokenizer(_read(path), spec)
    keys = open_gguf(find_model(spec).path).keys
    return PinnedTokenizer(json.dumps(tokenizer_json(keys), ensure_ascii=False).encode(), spec)


def recount(rows_path: str, tokenizer: PinnedTokenizer) -> None:
    """Rewrites a sender's file of rows; the texts beside it are read once and removed. Raises ConfigError."""
    texts, fresh = texts_path(rows_path), rows_path + ".counted"
    try:
        with open(rows_path, "rb") as rows, open(texts, "rb") as kept, open(fresh, "wb") as out:
            for record in _recounted(rows, kept, tokenizer):
                out.write(msgspec.json.encode(record) + b"\n")
        os.replace(fresh, rows_path)
        os.unlink(texts)
    except OSError as error:
        raise ConfigError(f"the rows cannot be counted again: {error.strerror or error}") from error


def _recounted(rows: IO[bytes], texts: IO[bytes], tokenizer: PinnedTokenizer) -> Iterator[RequestRecord]:
    for batch in _batches(paired(rows, texts)):
        chunked = [text.text for record, text in batch if text is not None and not _is_counted(record)]
        whole = [text.text for record, text in batch if text is not None and _is_counted(record)]
        ends, counts = iter(tokenizer.token_ends(chunked)), iter(tokenizer.counts(whole))
        for record, text in batch:
            if text is None:
                yield record
            elif _is_counted(record):
                yield msgspec.structs.replace(record, num_output_tokens_client=next(counts))
            else:
                yield retokenised(record, text.chunk_ends, next(ends))


def _is_counted(record: RequestRecord) -> bool:
    """Whether the server told the tokens of each chunk; then only their sum is counted again, which is quicker."""
    return record.token_count is TokenCount.SERVER


def paired(rows: IO[bytes], texts: IO[bytes]) -> Iterator[tuple[RequestRecord, AnswerText | None]]:
    """Texts stand in the order of their rows; a row may have none."""
    read_record, read_text = msgspec.json.Decoder(RequestRecord), msgspec.json.Decoder(AnswerText)
    answers = (read_text.decode(line) for line in texts)
    answer = next(answers, None)
    for line in rows:
        record = read_record.decode(line)
        if answer is not None and answer.request_id == record.request_id:
            yield record, answer
            answer = next(answers, None)
        else:
            yield record, None


def _batches(items: Iterator[_T]) -> Iterator[list[_T]]:
    while batch := list(islice(items, BATCH)):
        yield batch


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"cannot read the tokenizer {path}: {error.strerror or error}", param="tokenizer") from error
    if len(content) > FILE_BYTES_MAX:
        raise ConfigError(f"{path} is larger than {FILE_BYTES_MAX} bytes: is it a tokenizer?", param="tokenizer")
    return content
