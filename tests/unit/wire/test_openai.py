"""Hop 2: bodies become Requests, or are refused with the field at fault."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.errors import InvalidRequest, ModelNotFound, TailraceError, Unsupported
from tailrace.request import ChatPrompt, Message, Request, RequestId, SamplingDefaults, TextPrompt, TokenPrompt
from tailrace.wire.fields import IGNORED_FIELDS, REFUSED_FIELDS
from tailrace.wire.openai import (
    MAX_TOKENS_OPEN,
    RequestContext,
    parse_timeout_ms,
    to_chat_request,
    to_completion_request,
)

VOCAB = 1000
HELLO = [{"role": "user", "content": "hello"}]


def context(defaults: SamplingDefaults | None = None) -> RequestContext:
    return RequestContext(
        request_id=RequestId("r1"),
        arrival_ns=5,
        served_models=("m", "alias"),
        vocab_size=VOCAB,
        seed=77,
        defaults=defaults or SamplingDefaults(),
    )


def chat(defaults: SamplingDefaults | None = None, **fields: Any) -> Request:
    body = {"model": "m", "messages": HELLO, **fields}
    return to_chat_request(json.dumps(body).encode(), context(defaults))


def completion(defaults: SamplingDefaults | None = None, **fields: Any) -> Request:
    body = {"model": "m", "prompt": "hello", **fields}
    return to_completion_request(json.dumps(body).encode(), context(defaults))


def test_a_plain_chat_gets_openais_defaults() -> None:
    request = chat()
    assert request.prompts == (ChatPrompt((Message(role="user", content="hello"),)),)
    assert request.max_tokens_asked is None
    assert request.sampling.max_tokens == MAX_TOKENS_OPEN
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.top_k) == (1.0, 1.0, None)
    assert request.sampling.seed == 77
    assert (request.num_choices, request.stream, request.priority) == (1, False, 0)


def test_every_parameter_arrives() -> None:
    request = chat(
        temperature=0.5, top_p=0.9, top_k=40, min_p=0.1, seed=3, stop=["a", "b"], stop_token_ids=[5], n=3,
        presence_penalty=1, frequency_penalty=-1, repetition_penalty=1.1, logit_bias={"7": -100}, logprobs=True,
        top_logprobs=2, ignore_eos=True, min_tokens=4, max_tokens=9, stream=True,
        stream_options={"include_usage": True}, priority=-3, cache_salt="s",
    )  # fmt: skip
    params = request.sampling
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.seed) == (0.5, 0.9, 40, 0.1, 3)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (1.0, -1.0, 1.1)
    assert (params.logit_bias, params.num_logprobs, params.stop_token_ids) == ({7: -100.0}, 2, (5,))
    assert (params.ignore_eos, params.min_tokens, params.max_tokens) == (True, 4, 9)
    assert (request.stop, request.num_choices, request.stream, request.include_usage) == (("a", "b"), 3, True, True)
    assert (request.priority, request.cache_salt) == (-3, "s")


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"include_usage": True, "continuous_usage_stats": True}, (True, True)),
        ({"include_usage": True, "continuous_usage_stats": False}, (True, False)),
        ({"continuous_usage_stats": True}, (False, False)),
        ({"include_usage": True, "continuous_usage_stats": None}, (True, False)),
    ],
)
def test_usage_in_every_chunk_refines_include_usage(options: dict[str, Any], wanted: tuple[bool, bool]) -> None:
    request = chat(stream=True, stream_options=options)
    assert (request.include_usage, request.chunk_usage) == wanted


def test_the_callers_field_wins_over_the_models_and_the_models_over_openais() -> None:
    defaults = SamplingDefaults(temperature=0.2, top_k=7, repetition_penalty=1.2, max_tokens=33)
    request = chat(defaults, temperature=0.0)
    assert (request.sampling.temperature, request.sampling.top_k) == (0.0, 7)
    assert (request.sampling.repetition_penalty, request.sampling.max_tokens) == (1.2, 33)


def test_completions_default_to_openais_sixteen_tokens() -> None:
    assert completion().sampling.max_tokens == 16
    assert completion(SamplingDefaults(max_tokens=50)).sampling.max_tokens == 50


def test_max_completion_tokens_wins_over_its_older_name() -> None:
    assert chat(max_tokens=5, max_completion_tokens=8).sampling.max_tokens == 8


def test_null_counts_as_absent() -> None:
    request = chat(temperature=None, stop=None, tools=None, response_format=None, n=None, stream_options=None)
    assert request == chat()


def test_text_parts_are_joined_and_developer_is_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = chat(messages=[{"role": "developer", "content": "rules"}, {"role": "user", "content": parts}])
    assert request.prompts == (
        ChatPrompt((Message(role="system", content="rules"), Message(role="user", content="ab"))),
    )


def test_an_answers_own_message_can_be_sent_back() -> None:
    answer = {"role": "assistant", "content": "x", "refusal": None, "annotations": [], "tool_calls": None}
    assert chat(messages=[*HELLO, answer, *HELLO]).prompts[0] == ChatPrompt(
        (
            Message(role="user", content="hello"),
            Message(role="assistant", content="x"),
            Message(role="user", content="hello"),
        )
    )


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", (TextPrompt("a"),)),
        (["a", "b"], (TextPrompt("a"), TextPrompt("b"))),
        ([1, 2], (TokenPrompt((1, 2)),)),
        ([[1], [2, 3]], (TokenPrompt((1,)), TokenPrompt((2, 3)))),
    ],
)
def test_a_prompt_has_four_shapes(prompt: Any, prompts: Any) -> None:
    assert completion(prompt=prompt).prompts == prompts


def test_echo_with_logprobs_asks_for_the_prompts_too() -> None:
    request = completion(echo=True, logprobs=2, max_tokens=0)
    assert (request.sampling.num_prompt_logprobs, request.sampling.num_logprobs) == (2, 2)
    assert (request.max_tokens_asked, request.sampling.max_tokens) == (0, 1)
    assert completion(logprobs=2).sampling.num_prompt_logprobs is None


def test_harmless_fields_are_ignored() -> None:
    fields: dict[str, Any] = dict.fromkeys(IGNORED_FIELDS, "anything")
    fields |= {name: values[0] for name, values in REFUSED_FIELDS.items() if values}
    assert chat(**fields) == chat()


@pytest.mark.parametrize("name", sorted(REFUSED_FIELDS))
def test_what_is_not_done_is_refused_by_name(name: str) -> None:
    with pytest.raises(Unsupported) as error:
        chat(**{name: {"type": "json_schema"}})
    assert error.value.param == name


BAD_CHAT: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"seed": 2**63}, "seed"),
    ({"seed": 10**40}, "seed"),
    ({"n": 0}, "n"),
    ({"n": 10**9}, "n"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": 10**30}, "max_completion_tokens"),
    ({"min_tokens": 10, "max_tokens": 5}, "min_tokens"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"x": 1}}, "logit_bias.x"),
    ({"logit_bias": {"-1": 1}}, "logit_bias.-1"),
    ({"logit_bias": {"1000": 1}}, "logit_bias.1000"),
    ({"logit_bias": {"1": 101}}, "logit_bias[...]"),
    ({"logit_bias": {str(key): 1 for key in range(1025)}}, "logit_bias"),
    ({"stop": ""}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": ["y" * 257]}, "stop[0]"),
    ({"stop": 5}, "stop"),
    ({"stop_token_ids": [VOCAB]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"logprobs": 5}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"surprise": 1}}, "stream_options.surprise"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "x", "colour": "red"}]}, "messages[0].colour"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"temprature": 1}, "temprature"),
    ({"model": 5}, "model"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_CHAT)
def test_a_bad_field_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        chat(**fields)
    assert error.value.param == param


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "tool", "content": "x", "tool_call_id": "1"}, "messages[0].role"),
        ({"role": "assistant", "content": "x", "tool_calls": [{}]}, "messages[0].tool_calls"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "messages[0].content[0].type",
        ),
    ],
)
def test_messages_that_need_more_than_text_are_refused(message: dict[str, Any], param: str) -> None:
    with pytest.raises(Unsupported) as error:
        chat(messages=[message])
    assert error.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [VOCAB]}, "prompt"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": ["a"] * 65, "n": 2}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": True}, "logprobs"),
        ({"messages": HELLO}, "messages"),
    ],
)
def test_a_bad_completion_field_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        completion(**fields)
    assert error.value.param == param


def test_an_unknown_field_names_the_nearest() -> None:
    with pytest.raises(InvalidRequest, match="did you mean temperature"):
        chat(temprature=1)


def test_a_missing_field_is_named() -> None:
    with pytest.raises(InvalidRequest) as error:
        to_chat_request(b'{"model":"m"}', context())
    assert error.value.param == "messages"


def test_another_model_is_not_found() -> None:
    assert chat(model="alias").model == "alias"
    with pytest.raises(ModelNotFound, match="served: m, alias"):
        chat(model="gpt-4")


HOSTILE = [
    b"",
    b"{",
    b"[]",
    b"null",
    b"\xff\xfe",
    b'{"model":"m","messages":[{"role":"user","content":"\xff"}]}',
    b'{"model":"m","messages":[{"role":"user","content":"\\ud800"}]}',
    b'{"model":"m","temperature":NaN,"messages":[]}',
    b'{"model":"m","temperature":Infinity}',
    b'{"model":"m","temperature":1e999}',
    b'{"model":"m","max_tokens":' + b"9" * 5000 + b"}",
    b'{"model":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    b'{"tools":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    b'{"model":"m"} trailing',
    b'{"' + b"x" * 10_000 + b'":1}',
    b'{"tools":"\xff"}',
    b'{"model":"m","messages":[{"role":"user","content":"x"}],"metadata":"\xff"',
]


@pytest.mark.parametrize("body", HOSTILE)
def test_hostile_bodies_are_refused_and_never_raise_otherwise(body: bytes) -> None:
    for parse in (to_chat_request, to_completion_request):
        with pytest.raises(InvalidRequest) as error:
            parse(body, context())
        assert len(error.value.message) < 500


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(
    ["messages", "prompt", "n", "stop", "logit_bias", "stream_options", "max_tokens", "tools", "model", "seed", "top_k"]
)


def status_of(parse: Callable[[bytes, RequestContext], Request], body: bytes) -> int:
    try:
        parse(body, context())
    except TailraceError as error:
        return error.row.http_status
    return 200


@given(st.dictionaries(NAMES | st.text(max_size=4), JSON, max_size=6))
def test_any_json_is_parsed_or_refused_from_the_tree(fields: dict[str, Any]) -> None:
    body = json.dumps({"model": "m", "messages": HELLO, **fields}).encode()
    for parse in (to_chat_request, to_completion_request):
        assert status_of(parse, body) in (200, 400, 404)


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "x", "", "9" * 30, "１", "86400001"])
def test_an_absurd_timeout_is_refused(value: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        parse_timeout_ms(value)
    assert error.value.param == "x-request-timeout-ms"


def test_a_timeout_is_milliseconds() -> None:
    assert parse_timeout_ms("1500") == 1500


def test_a_negative_seed_is_sixty_four_bits() -> None:
    assert chat(seed=-1).sampling.seed == 2**64 - 1


def test_top_p_of_zero_keeps_a_positive_mass() -> None:
    assert 0 < chat(top_p=0).sampling.top_p < 1e-3
