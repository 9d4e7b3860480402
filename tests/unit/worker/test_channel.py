"""Frames between the app and its engine: whole, in order, whatever the borders of the chunks."""

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.engine.step import SchedulerStats, SequenceEvent
from tailrace.request import FinishReason, PositionLogprobs, RequestId, SamplingParams, SequenceId, TokenLogprob
from tailrace.worker.channel import (
    FRAME_BYTES_MAX,
    Cancel,
    Fatal,
    Finish,
    FrameParser,
    Progress,
    ReadSteps,
    StepLog,
    StepReport,
    Stop,
    Submit,
    encode_frame,
    frame_length,
    from_engine_decoder,
    to_engine_decoder,
)

ids = st.integers(0, 2**63 - 1)
floats = st.floats(allow_nan=False)
logprobs = st.lists(
    st.builds(PositionLogprobs, chosen=st.builds(TokenLogprob, token_id=ids, logprob=floats)), max_size=3
).map(tuple)
params = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 10**6),
    seed=st.integers(0, 2**64 - 1),
    logit_bias=st.dictionaries(ids, floats, max_size=3),
)
submits = st.builds(
    Submit,
    request_id=st.text(),
    sequence_ids=st.lists(ids, min_size=1, max_size=4).map(tuple),
    prompt_token_ids=st.lists(ids, max_size=50),
    params=params,
    priority=st.integers(-100, 100),
    arrival_ns=ids,
    deadline_ns=st.none() | ids,
    cache_salt=st.text(),
)
to_engine = st.one_of(
    submits,
    st.builds(Cancel, st.text()),
    st.builds(Finish, ids, st.sampled_from(FinishReason), ids),
    st.builds(ReadSteps, ids),
    st.just(Stop()),
)
events = st.builds(
    SequenceEvent,
    sequence_id=ids,
    token_ids=st.lists(ids, max_size=5).map(tuple),
    logprobs=logprobs,
    finish_reason=st.none() | st.sampled_from(FinishReason),
    error_message=st.none() | st.text(),
)
from_engine = st.one_of(
    st.builds(Progress, st.text(), st.text()),
    st.builds(StepReport, events=st.lists(events, max_size=4), stats=st.builds(SchedulerStats, num_running=ids)),
    st.builds(StepLog, ids, st.just([])),
    st.builds(Fatal, st.text(), st.text()),
)


def chunks(data: bytes, cuts: list[int]) -> list[bytes]:
    borders = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in itertools.pairwise(borders)]


@given(messages=st.lists(to_engine, max_size=6), cuts=st.lists(st.integers(0, 10**6), max_size=40))
def test_messages_to_the_engine_arrive_whole_and_in_order_across_any_chunk_borders(
    messages: list[msgspec.Struct], cuts: list[int]
) -> None:
    parser = FrameParser()
    stream = b"".join(encode_frame(message) for message in messages)
    bodies = [body for chunk in chunks(stream, cuts) for body in parser.feed(chunk)]
    assert [to_engine_decoder.decode(body) for body in bodies] == messages


@given(messages=st.lists(from_engine, max_size=6), cuts=st.lists(st.integers(0, 10**6), max_size=40))
def test_messages_of_the_engine_arrive_whole_and_in_order_across_any_chunk_borders(
    messages: list[msgspec.Struct], cuts: list[int]
) -> None:
    parser = FrameParser()
    stream = b"".join(encode_frame(message) for message in messages)
    bodies = [body for chunk in chunks(stream, cuts) for body in parser.feed(chunk)]
    assert [from_engine_decoder.decode(body) for body in bodies] == messages


def test_a_frame_is_not_given_out_before_its_last_byte() -> None:
    frame = encode_frame(Cancel(RequestId("a")))
    parser = FrameParser()
    for i in range(len(frame) - 1):
        assert parser.feed(frame[i : i + 1]) == []
    assert len(parser.feed(frame[-1:])) == 1


def test_an_absurd_length_is_refused_before_anything_is_buffered_for_it() -> None:
    prefix = (FRAME_BYTES_MAX + 1).to_bytes(4, "little")
    with pytest.raises(ValueError, match="not a tailrace engine"):
        frame_length(prefix)
    with pytest.raises(ValueError, match="not a tailrace engine"):
        FrameParser().feed(prefix)


@given(st.binary(max_size=60))
def test_a_body_that_is_no_message_raises_value_error_and_nothing_else(body: bytes) -> None:
    for decoder in (to_engine_decoder, from_engine_decoder):
        try:
            decoder.decode(body)
        except ValueError:
            continue


def test_a_message_of_the_wrong_direction_is_refused() -> None:
    body = FrameParser().feed(encode_frame(Finish(SequenceId(1), FinishReason.STOP, 3)))[0]
    with pytest.raises(msgspec.ValidationError):
        from_engine_decoder.decode(body)
