"""The values that cross folders."""

import msgspec
import pytest

from tailrace.request import (
    ChatPrompt,
    FinishReason,
    Message,
    Prompt,
    Request,
    RequestId,
    SamplingParams,
    TextPrompt,
    TokenPrompt,
)


def test_finish_reasons_keep_their_wire_names() -> None:
    assert [str(reason) for reason in FinishReason] == ["stop", "length", "cancelled", "deadline", "error"]


@pytest.mark.parametrize(
    ("params", "needs"),
    [
        (SamplingParams(max_tokens=1), False),
        (SamplingParams(max_tokens=1, temperature=0.0, top_k=5), False),
        (SamplingParams(max_tokens=1, presence_penalty=0.1), True),
        (SamplingParams(max_tokens=1, frequency_penalty=-0.1), True),
        (SamplingParams(max_tokens=1, repetition_penalty=1.1), True),
    ],
)
def test_only_penalties_need_the_history(params: SamplingParams, needs: bool) -> None:
    assert params.needs_history is needs


@pytest.mark.parametrize(
    "prompt",
    [
        ChatPrompt(messages=(Message(role="user", content="é"),)),
        TextPrompt(text="once"),
        TokenPrompt(token_ids=(1, 2)),
    ],
)
def test_a_request_survives_its_codec(prompt: Prompt) -> None:
    request = Request(
        request_id=RequestId("r"),
        model="m",
        arrival_ns=1,
        prompts=(prompt,),
        sampling=SamplingParams(max_tokens=3, logit_bias={5: -1.0}),
        stop=("x",),
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=Request) == request
