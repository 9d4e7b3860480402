"""A count of output tokens by the service's own `/tokenize`, after the run, for a sample of the answers."""

import os
from collections.abc import Sequence
from typing import Any

import msgspec

from tailrace.errors import ClientFailed
from tailrace.measure.record import RequestRecord
from tailrace.workload.job import Endpoint, texts_path
from tailrace.workload.run.endpoint import ask
from tailrace.workload.run.second_count import paired

SAMPLE_MAX = 200
"""Answers that an endpoint is asked to count."""
LIMIT_S = 30.0


class EndpointRecount:
    """With the service's own `/tokenize`, for a sample: it is asked once an answer."""

    async def __call__(self, rows_paths: Sequence[str], endpoint: Endpoint) -> list[str]:
        counter = _EndpointCounter(endpoint)
        num = sum([await self._count_some(path, counter, SAMPLE_MAX // len(rows_paths)) for path in rows_paths])
        if counter.problem:
            return [f"output tokens were not counted again: {counter.problem}"]
        return [f"output tokens of {num} answers were counted again by the endpoint's /tokenize"]

    async def _count_some(self, rows_path: str, counter: "_EndpointCounter", num_max: int) -> int:
        with open(rows_path, "rb") as rows, open(texts_path(rows_path), "rb") as kept:
            num_texts = sum(1 for _ in kept)
            kept.seek(0)
            step, counted, seen = max(1, -(-num_texts // max(num_max, 1))), 0, 0
            with open(rows_path + ".counted", "wb") as out:
                for record, text in paired(rows, kept):
                    number = None
                    if text is not None:
                        number = await counter.count(text.text) if seen % step == 0 else None
                        seen += 1
                    counted += number is not None
                    out.write(msgspec.json.encode(_with_count(record, number)) + b"\n")
        os.replace(rows_path + ".counted", rows_path)
        os.unlink(texts_path(rows_path))
        return counted


class _EndpointCounter:
    """vLLM and tailrace take `prompt`, llama-server takes `content`."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._field = "prompt"
        self.problem = ""

    async def count(self, text: str) -> int | None:
        if self.problem:
            return None
        problem = ""
        for field in dict.fromkeys((self._field, "prompt", "content")):
            body: dict[str, Any] = {"content": text} if field == "content" else {"prompt": text}
            body |= {"model": self._endpoint.model, "add_special_tokens": False} if field == "prompt" else {}
            try:
                content = await ask(self._endpoint, "POST", "/tokenize", msgspec.json.encode(body), LIMIT_S)
                found = msgspec.json.decode(content, type=_Tokenized)
            except (ClientFailed, msgspec.DecodeError) as error:
                problem = str(error)
                continue
            if text and not found.tokens:
                problem = "/tokenize found no token in an answer"  # it reads another field
                continue
            self._field = field
            return len(found.tokens)
        self.problem = problem
        return None


class _Tokenized(msgspec.Struct):
    tokens: list[Any]


def _with_count(record: RequestRecord, number: int | None) -> RequestRecord:
    return record if number is None else msgspec.structs.replace(record, num_output_tokens_client=number)
