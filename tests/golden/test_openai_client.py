"""The real `openai` client, unchanged, against a real worker: what its users see."""

import json
import urllib.request
from typing import Any, cast

import openai
import pytest
from live_worker import CONTEXT_MAX, WAIT_S, LiveWorker
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessageParam

HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "the stream goes on"}]


def forced(worker: LiveWorker, text: str) -> dict[str, int]:
    """A bias that, with a repetition penalty of 10, makes a greedy engine begin its answer with `text`.

    The penalty divides the bias of a token that was said by ten; steps of 14 are above what the engine itself prefers.
    """
    ids = worker.text_model.encode(text, special=False)
    assert len(set(ids)) == len(ids) <= 6, "each token once"
    return {str(token_id): 100 - 14 * i for i, token_id in enumerate(ids)}


def test_a_chat_answer_has_text_reason_and_usage(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="modeled", messages=HELLO, max_tokens=12, temperature=0)
    assert isinstance(answer, ChatCompletion)
    assert answer.id.startswith("chatcmpl-")
    (choice,) = answer.choices
    assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
    assert choice.message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12
    assert answer.usage.prompt_tokens_details is not None


def test_a_stream_is_role_content_finish_usage_and_equals_the_whole_answer(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="modeled", messages=HELLO, max_tokens=40, temperature=0.7, seed=5)
    stream = client.chat.completions.create(
        model="modeled",
        messages=HELLO,
        max_tokens=40,
        temperature=0.7,
        seed=5,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert all(isinstance(chunk, ChatCompletionChunk) for chunk in chunks)
    first, *middle, finish, usage = chunks
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert all(chunk.choices[0].delta.role is None for chunk in middle)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in middle)
    assert text == whole.choices[0].message.content
    assert (finish.choices[0].finish_reason, finish.choices[0].delta.content) == ("length", None)
    assert usage.choices == []
    assert usage.usage is not None
    assert whole.usage is not None
    assert usage.usage.completion_tokens == whole.usage.completion_tokens == 40
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


CHUNK_USAGE = {"include_usage": True, "continuous_usage_stats": True}


def test_usage_in_every_chunk_counts_the_tokens_so_far_and_changes_nothing_else(client: openai.OpenAI) -> None:
    common: dict[str, Any] = {"model": "modeled", "messages": HELLO, "max_tokens": 24, "temperature": 0, "stream": True}
    plain = list(client.chat.completions.create(**common, stream_options={"include_usage": True}))
    first, *middle, total = list(client.chat.completions.create(**common, stream_options=CHUNK_USAGE))
    counts = [chunk.usage.completion_tokens for chunk in (first, *middle) if chunk.usage is not None]
    assert len(counts) == 1 + len(middle), "no chunk without"
    assert counts[0] == 0, "the role is no token"
    assert counts == sorted(counts)
    assert counts[-1] == total.usage.completion_tokens == 24
    assert {chunk.usage.prompt_tokens for chunk in (first, *middle)} == {total.usage.prompt_tokens}
    texts = ["".join(c.choices[0].delta.content or "" for c in chunks if c.choices) for chunks in (plain, middle)]
    assert texts[0] == texts[1]


def test_usage_in_every_chunk_is_of_its_own_choice(client: openai.OpenAI) -> None:
    chunks = list(
        client.completions.create(
            model="modeled", prompt="the tail", n=2, max_tokens=6, temperature=1, stream=True,
            stream_options=cast(Any, CHUNK_USAGE),
        )
    )  # fmt: skip
    *rows, total = chunks
    last = {chunk.choices[0].index: chunk.usage.completion_tokens for chunk in rows if chunk.usage is not None}
    assert last == {0: 6, 1: 6}
    assert total.usage is not None
    assert total.usage.completion_tokens == 12


def test_continuous_usage_alone_means_nothing(worker: LiveWorker) -> None:
    body = {"model": "modeled", "prompt": "the tail", "max_tokens": 2, "stream": True}
    with urllib.request.urlopen(
        urllib.request.Request(
            f"{worker.url}/v1/completions",
            json.dumps(body | {"stream_options": {"continuous_usage_stats": True}}).encode(),
        ),
        timeout=WAIT_S,
    ) as answer:
        assert b"usage" not in answer.read()


def test_without_include_usage_there_is_no_usage(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model="modeled", messages=HELLO, max_tokens=3, stream=True))
    assert all(chunk.choices for chunk in chunks)


def test_a_completion_stream_equals_the_whole_completion(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="modeled", prompt="the tail", max_tokens=20, temperature=0)
    assert isinstance(whole, Completion)
    chunks = list(
        client.completions.create(model="modeled", prompt="the tail", max_tokens=20, temperature=0, stream=True)
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == "length"


def test_completions_answer_sixteen_tokens_unless_told(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="modeled", prompt="the tail")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


def test_without_a_limit_a_chat_fills_the_context(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="modeled", messages=HELLO, extra_body={"ignore_eos": True})
    assert answer.usage is not None
    assert answer.usage.total_tokens == CONTEXT_MAX
    assert answer.choices[0].finish_reason == "length"


def test_choices_differ_and_are_all_there(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="modeled", messages=HELLO, n=3, max_tokens=12, temperature=1, seed=1)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in whole.choices}) == 3
    texts = ["", "", ""]
    reasons: list[str | None] = [None, None, None]
    for chunk in client.chat.completions.create(
        model="modeled", messages=HELLO, n=3, max_tokens=12, temperature=1, seed=1, stream=True
    ):
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == ["length"] * 3


def test_several_prompts_give_their_choices_in_order(client: openai.OpenAI) -> None:
    prompts = ["the tail", "a queue", "the engine"]
    alone = [
        client.completions.create(model="modeled", prompt=prompt, max_tokens=6, temperature=0).choices[0].text
        for prompt in prompts
    ]
    together = client.completions.create(model="modeled", prompt=prompts, max_tokens=6, temperature=0)
    assert [choice.text for choice in together.choices] == alone
    assert [choice.index for choice in together.choices] == [0, 1, 2]


def test_token_ids_are_a_prompt(client: openai.OpenAI, worker: LiveWorker) -> None:
    ids = worker.text_model.encode("the tail", special=True)
    by_ids = client.completions.create(model="modeled", prompt=ids, max_tokens=6, temperature=0)
    by_text = client.completions.create(model="modeled", prompt="the tail", max_tokens=6, temperature=0)
    assert by_ids.choices[0].text == by_text.choices[0].text


@pytest.mark.parametrize("stop", ["x!", "!🌊", "🌊", ["zz", "x!🌊"]])
def test_a_stop_string_across_token_borders_ends_the_answer(
    client: openai.OpenAI, worker: LiveWorker, stop: str | list[str]
) -> None:
    common = {
        "logit_bias": forced(worker, "x!🌊"),
        "temperature": 0,
        "max_tokens": 60,
        "stop": stop,
        "extra_body": {"repetition_penalty": 10},
    }
    whole = client.chat.completions.create(model="modeled", messages=HELLO, **common)  # type: ignore[call-overload]
    chunks = list(
        client.chat.completions.create(model="modeled", messages=HELLO, stream=True, **common)  # type: ignore[call-overload]
    )
    text = whole.choices[0].message.content
    assert whole.choices[0].finish_reason == "stop"
    stops = [stop] if isinstance(stop, str) else stop
    assert any("x!🌊".startswith(text + each) for each in stops)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    ends_at = max(len((text + each).encode()) for each in stops)
    assert whole.usage.completion_tokens == ends_at


@pytest.mark.parametrize(("num_tokens", "text"), [(6, "x🌊!"), (5, "x🌊"), (4, "x"), (2, "x")])
def test_no_chunk_has_half_an_emoji(client: openai.OpenAI, worker: LiveWorker, num_tokens: int, text: str) -> None:
    stream = client.chat.completions.create(
        model="modeled",
        messages=HELLO,
        logit_bias=forced(worker, "x🌊!"),
        temperature=0,
        max_tokens=num_tokens,
        stream=True,
        extra_body={"repetition_penalty": 10},
    )
    texts = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert "".join(texts) == text
    assert all(part in ("", "x", "🌊", "!", "x🌊", "🌊!", "x🌊!") for part in texts)


def test_chat_logprobs_belong_to_the_text(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="modeled", messages=HELLO, max_tokens=8, temperature=0, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 8
    for token in logprobs.content:
        assert token.logprob <= 0
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].logprob == max(top.logprob for top in token.top_logprobs)
    data = bytes(byte for token in logprobs.content for byte in token.bytes or [])
    assert data.decode(errors="replace").startswith(answer.choices[0].message.content or "")


def test_streamed_logprobs_are_those_of_the_whole_answer(client: openai.OpenAI) -> None:
    def tokens(streamed: bool) -> list[tuple[str, float]]:
        answer = client.chat.completions.create(  # type: ignore[call-overload]
            model="modeled", messages=HELLO, max_tokens=20, temperature=0, logprobs=True, stream=streamed
        )
        parts = answer if streamed else [answer]
        return [
            (token.token, token.logprob)
            for part in parts
            for choice in part.choices
            if choice.logprobs is not None
            for token in choice.logprobs.content
        ]

    assert tokens(True) == tokens(False)


def test_echo_with_logprobs_scores_the_prompt(client: openai.OpenAI, worker: LiveWorker) -> None:
    prompt = "the engine owns the step"
    ids = worker.text_model.encode(prompt, special=True)
    answer = client.completions.create(model="modeled", prompt=prompt, max_tokens=0, echo=True, logprobs=2)
    (choice,) = answer.choices
    assert choice.text == prompt
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == [worker.text_model.token_text(token_id) for token_id in ids]
    assert choice.logprobs.token_logprobs is not None
    first, *others = choice.logprobs.token_logprobs
    assert first is None
    assert all(value < 0 for value in others)
    assert len(others) == len(ids) - 1
    assert choice.logprobs.text_offset is not None
    assert choice.logprobs.text_offset[0] == 0
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0


def test_echo_comes_before_the_answer_in_a_stream(client: openai.OpenAI) -> None:
    chunks = list(
        client.completions.create(
            model="modeled", prompt="the tail", max_tokens=5, echo=True, temperature=0, stream=True, n=2
        )
    )
    whole = client.completions.create(model="modeled", prompt="the tail", max_tokens=5, echo=True, temperature=0, n=2)
    for index in (0, 1):
        text = "".join(c.choices[0].text for c in chunks if c.choices[0].index == index)
        assert text == whole.choices[index].text
        assert text.startswith("the tail")


def test_a_seed_repeats_an_answer(client: openai.OpenAI) -> None:
    def text(seed: int) -> str | None:
        answer = client.chat.completions.create(model="modeled", messages=HELLO, max_tokens=16, seed=seed)
        return answer.choices[0].message.content

    assert text(3) == text(3)
    assert text(3) != text(4)


def test_special_tokens_in_a_users_text_are_only_text(client: openai.OpenAI, worker: LiveWorker) -> None:
    plain = worker.text_model.encode("<|im_end|>", special=False)
    usages = []
    for content in ("", "<|im_end|>"):
        answer = client.chat.completions.create(
            model="modeled", messages=[{"role": "user", "content": content}], max_tokens=1
        )
        assert answer.usage is not None
        usages.append(answer.usage.prompt_tokens)
    assert usages[1] - usages[0] == len(plain) > 1


def test_models_are_listed_with_context_and_hash(client: openai.OpenAI) -> None:
    models = client.models.list().data
    assert [model.id for model in models] == ["modeled", "alias"]
    model = client.models.retrieve("modeled").model_dump()
    assert model["max_model_len"] == CONTEXT_MAX
    assert model["content_hash"] == "c0ffee" * 10
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/model")


def test_an_alias_is_accepted_and_named_in_the_answer(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="alias", messages=HELLO, max_tokens=1)
    assert answer.model == "alias"


def test_a_prompt_beyond_the_context_is_refused_with_both_numbers(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model="modeled", prompt=[5] * (CONTEXT_MAX + 7))
    assert error.value.code == "context_length_exceeded"
    assert str(CONTEXT_MAX + 7) in error.value.message
    assert str(CONTEXT_MAX) in error.value.message


def test_refusals_have_openais_shape(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="modeled", messages=HELLO, temperature=3)
    assert (error.value.code, error.value.param, error.value.type) == (
        "invalid_request",
        "temperature",
        "invalid_request_error",
    )
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-9", messages=HELLO)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as unsupported:
        client.chat.completions.create(
            model="modeled", messages=HELLO, tools=[{"type": "function", "function": {"name": "f"}}]
        )
    assert (unsupported.value.code, unsupported.value.param) == ("unsupported", "tools")


@pytest.mark.parametrize("streamed", [False, True])
def test_a_deadline_that_passes_is_answered_as_one(client: openai.OpenAI, streamed: bool) -> None:
    def read() -> None:
        answer = client.chat.completions.create(  # type: ignore[call-overload]
            model="modeled",
            messages=HELLO,
            stream=streamed,
            extra_headers={"x-request-timeout-ms": "30"},
            extra_body={"ignore_eos": True},
        )
        list(answer)

    with pytest.raises(openai.APIError) as error:
        read()
    assert error.value.code == "deadline_exceeded"


def test_usage_tells_what_the_prefix_cache_held(client: openai.OpenAI) -> None:
    prompt = [300 + i % 50 for i in range(100)]

    def cached() -> int | None:
        answer = client.completions.create(model="modeled", prompt=prompt, max_tokens=1)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens

    assert (cached(), cached()) == (0, 96)


def test_a_stop_token_ends_the_answer_and_is_not_shown(client: openai.OpenAI, worker: LiveWorker) -> None:
    (stop_id,) = worker.text_model.encode("!", special=False)
    answer = client.chat.completions.create(
        model="modeled",
        messages=HELLO,
        logit_bias=forced(worker, "x🌊!"),
        temperature=0,
        max_tokens=20,
        extra_body={"repetition_penalty": 10, "stop_token_ids": [stop_id]},
    )
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("x🌊", "stop")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6


def test_more_log_probabilities_than_an_answer_may_hold_are_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="log-probabilities") as error:
        client.chat.completions.create(
            model="modeled", messages=HELLO, n=128, logprobs=True, top_logprobs=20, max_tokens=400
        )
    assert error.value.param == "logprobs"


def test_echoed_prompts_count_among_the_log_probabilities(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="log-probabilities"):
        client.completions.create(model="modeled", prompt=[5] * 450, n=128, echo=True, logprobs=20, max_tokens=1)
