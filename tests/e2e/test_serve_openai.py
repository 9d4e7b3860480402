"""The real `openai` client against `tailrace serve` with the packaged model: what a model that makes sense adds.

The form of every answer is held by the golden tests over the modeled engine; here it is what the kernels, the model's
own tokenizer and its template make of it.
"""

import math
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam
from serving import ANSWER, MODEL, WAIT_S, Served, Stream, finish_reason, served

from tailrace.model.text import TextModel

pytestmark = pytest.mark.model

CAPITAL = "The capital of France is"
RIVER: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Name a river."}]


@pytest.fixture(scope="module")
def text_model(smollm2_dir: Path) -> TextModel:
    return TextModel.load(smollm2_dir)


@pytest.fixture(scope="module")
def service(smollm2_dir: Path) -> Iterator[Served]:
    del smollm2_dir  # converted before the service counts its start
    with served() as running:
        yield running


@pytest.fixture(scope="module")
def client(service: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=WAIT_S) as real:
        yield real


def complete(client: openai.OpenAI, prompt: str | list[int], **fields: object) -> str:
    answer = client.completions.create(model=MODEL, prompt=prompt, **fields)  # type: ignore[call-overload]
    return str(answer.choices[0].text)


def test_the_model_knows_a_capital(client: openai.OpenAI) -> None:
    assert complete(client, CAPITAL, max_tokens=4, temperature=0).startswith(" Paris")


def test_a_streamed_chat_equals_the_whole_one(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=RIVER, max_tokens=16, temperature=0)
    assert whole.usage is not None
    assert whole.choices[0].message.content
    stream = client.chat.completions.create(
        model=MODEL,
        messages=RIVER,
        max_tokens=16,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    usage = chunks[-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (
        whole.usage.prompt_tokens,
        whole.usage.completion_tokens,
    )
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason


def test_a_chat_ends_where_the_model_ends_it(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hi"}], max_tokens=100, temperature=0
    )
    assert answer.choices[0].finish_reason == "stop"
    assert "<|im_end|>" not in (answer.choices[0].message.content or "")


def test_a_seed_repeats_a_sampled_answer(client: openai.OpenAI) -> None:
    def text(seed: int) -> str:
        return complete(client, "Once upon a time", max_tokens=16, temperature=1, seed=seed)

    # Fewer than 32 prompt tokens: no prefix hit, so both runs compute the same steps.
    assert text(7) == text(7)
    assert text(7) != text(8)


def test_two_choices_share_the_prompt_and_differ(client: openai.OpenAI, service: Served) -> None:
    before = service.metric("tailrace_cached_tokens_total", source="fork")
    answer = client.chat.completions.create(
        model=MODEL, messages=RIVER, n=2, max_tokens=12, temperature=1, seed=3, extra_body={"ignore_eos": True}
    )
    texts = [choice.message.content for choice in answer.choices]
    assert texts[0] != texts[1]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 24
    assert service.metric("tailrace_cached_tokens_total", source="fork") > before, "the second choice is a fork"


def test_logprobs_are_of_one_distribution_and_greedy_takes_its_top(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=RIVER, max_tokens=8, temperature=0, logprobs=True, top_logprobs=5
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content
    for token in logprobs.content:
        assert token.top_logprobs[0].token == token.token
        assert token.top_logprobs[0].logprob == token.logprob
        assert 0.01 < sum(math.exp(top.logprob) for top in token.top_logprobs) <= 1.0001
    said = b"".join(bytes(token.bytes or []) for token in logprobs.content).decode(errors="replace")
    assert said.startswith(answer.choices[0].message.content or "nothing was said")


def test_the_echoed_prompt_is_scored_as_the_answer_is(client: openai.OpenAI, text_model: TextModel) -> None:
    prompt = f"{CAPITAL} Paris"
    drawn = client.completions.create(model=MODEL, prompt=CAPITAL, max_tokens=1, temperature=0, logprobs=3)
    echoed = client.completions.create(model=MODEL, prompt=prompt, max_tokens=0, echo=True, logprobs=1)
    answer, scored = drawn.choices[0].logprobs, echoed.choices[0].logprobs
    assert answer is not None
    assert scored is not None
    assert answer.token_logprobs is not None
    assert scored.token_logprobs is not None
    assert scored.tokens is not None
    assert echoed.choices[0].text == prompt
    assert len(scored.tokens) == len(text_model.encode(prompt, special=True))
    assert scored.token_logprobs[0] is None
    assert (drawn.choices[0].text, scored.tokens[-1]) == (" Paris", " Paris")
    # Other step sizes, other rounding: the bound is far below what another position or token would make.
    assert scored.token_logprobs[-1] == pytest.approx(answer.token_logprobs[0], abs=0.05)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_stop_string_inside_tokens_ends_the_answer_before_it(client: openai.OpenAI, streamed: bool) -> None:
    whole = complete(client, CAPITAL, max_tokens=24, temperature=0)
    stop = whole[9:16]
    expected = whole[: whole.index(stop)]
    answer = client.completions.create(
        model=MODEL, prompt=CAPITAL, max_tokens=24, temperature=0, stop=[stop, "\x00never"], stream=streamed
    )
    parts = list(answer) if isinstance(answer, openai.Stream) else [answer]
    assert "".join(part.choices[0].text for part in parts) == expected
    assert parts[-1].choices[0].finish_reason == "stop"


def test_an_emoji_of_several_tokens_is_never_cut_in_a_stream(service: Served, text_model: TextModel) -> None:
    ids = text_model.encode("🌊", special=False)
    assert len(set(ids)) == len(ids) > 1, "one emoji, several tokens, each once"
    # The bias orders them; the penalty takes what was said out of the race.
    bias = {str(token_id): 100 - 12 * i for i, token_id in enumerate(ids)}
    body = ANSWER | {"max_tokens": len(ids) + 3, "logit_bias": bias, "repetition_penalty": 10}
    stream = Stream(service, body)
    events = stream.rest()
    assert stream.text().startswith("🌊")
    stream.raw.decode("utf-8")
    assert not any("\ufffd" in event.data or "\\ufffd" in event.data for event in events)
    whole = service.post("/v1/chat/completions", body).json
    assert whole["choices"][0]["message"]["content"] == stream.text()


def test_the_second_identical_request_finds_its_prefix(client: openai.OpenAI, service: Served) -> None:
    prompt = [1_000 + i for i in range(100)]

    def cached() -> int | None:
        answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=1, temperature=0)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens

    before = service.metric("vllm:prefix_cache_hits_total")
    assert (cached(), cached()) == (0, 96)
    assert service.metric("vllm:prefix_cache_hits_total") == before + 96


def test_without_a_limit_a_chat_fills_the_context(service: Served) -> None:
    num_words = 480 - service.post("/tokenize", {"messages": [{"role": "user", "content": ""}]}).json["count"]
    body = ANSWER | {"messages": [{"role": "user", "content": " the" * num_words}], "ignore_eos": True}
    answer = service.post("/v1/chat/completions", body).json
    assert answer["usage"]["total_tokens"] == 512
    assert answer["usage"]["prompt_tokens"] >= 470
    assert answer["choices"][0]["finish_reason"] == "length"


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model=MODEL, prompt=[5] * 600)
    assert error.value.code == "context_length_exceeded"
    assert "600" in error.value.message
    assert "512" in error.value.message
    with pytest.raises(openai.BadRequestError, match="512"):
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "river " * 600}])


def test_penalties_and_cuts_of_the_distribution_take_effect(client: openai.OpenAI, text_model: TextModel) -> None:
    prompt = "one two one two one two one two"
    plain = complete(client, prompt, max_tokens=12, temperature=0)
    assert plain.count("two") > 2, "the model repeats: the test needs it"
    said = {str(token_id): -100 for token_id in text_model.encode(plain, special=False)}
    for fields in (
        {"frequency_penalty": 2, "presence_penalty": 2},
        {"extra_body": {"repetition_penalty": 3}},
        {"logit_bias": said},
    ):
        assert complete(client, prompt, max_tokens=12, temperature=0, **fields) != plain, fields
    # A distribution cut to one token is greedy at any temperature.
    for narrow in ({"top_p": 0.0001}, {"extra_body": {"top_k": 1}}, {"extra_body": {"min_p": 1.0}}):
        assert complete(client, prompt, max_tokens=12, temperature=1, **narrow) == plain, narrow


def test_min_tokens_keeps_the_end_token_away(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=40,
        temperature=0,
        extra_body={"min_tokens": 30},
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens >= 30


def test_a_stream_ends_with_done_and_one_reason(service: Served) -> None:
    assert finish_reason(Stream(service, ANSWER | {"max_tokens": 5}).rest()) == "length"


def test_the_step_log_is_off_unless_asked_for(service: Served) -> None:
    answer = service.get("/debug/steps")
    assert (answer.status, answer.code) == (404, "not_found")
    assert "debug_steps" in answer.json["error"]["message"]


def test_no_browser_may_call_unless_allowed(service: Served) -> None:
    assert "access-control-allow-origin" not in service.get("/v1/models", origin="https://app.example").headers
