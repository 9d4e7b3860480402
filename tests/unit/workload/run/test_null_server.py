"""The null server speaks the protocol that clients know, and says when it wrote each chunk."""

import json
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from null_service import null_service


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with null_service(pace_ms=2) as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def test_it_lists_its_model(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["null-model"]


def test_a_chat_has_as_many_chunks_as_tokens_and_each_says_when_it_was_written(client: openai.OpenAI) -> None:
    before_ns = time.monotonic_ns()
    messages: Any = [{"role": "user", "content": "hello"}]
    chunks = [
        json.loads(chunk.model_dump_json())
        for chunk in client.chat.completions.create(model="null-model", messages=messages, max_tokens=5, stream=True)
    ]
    written = [chunk["written_ns"] for chunk in chunks if "written_ns" in chunk]
    assert len(written) == 5
    assert written == sorted(written)
    assert before_ns <= written[0]
    assert written[-1] <= time.monotonic_ns()
    assert written[-1] - before_ns >= 4 * 2_000_000, "the pace is 2 ms"
    assert chunks[-1]["usage"]["completion_tokens"] == 5
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"


def test_a_completion_streams_or_comes_whole(client: openai.OpenAI) -> None:
    streamed = list(client.completions.create(model="null-model", prompt="a", max_tokens=3, stream=True))
    assert "".join(chunk.choices[0].text for chunk in streamed if chunk.choices) == "word " * 3
    whole = client.completions.create(model="null-model", prompt="a", max_tokens=3)
    assert whole.usage is not None
    assert (whole.choices[0].text, whole.usage.completion_tokens) == ("word " * 3, 3)


def test_a_body_that_is_no_json_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="null-model", messages=[], max_tokens="many")  # type: ignore[call-overload]
