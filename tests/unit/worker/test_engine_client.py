"""The client against hostile engines: small real processes that speak the channel wrongly, or stop speaking.

What an honest engine does is tested in tests/e2e/test_engine_faults.py.
"""

import asyncio
import gc
import sys
import textwrap
from collections.abc import Awaitable, Callable

import pytest

from tailrace.engine.step import SequenceEvent
from tailrace.errors import Draining, EngineDied, ModelRefused, NotReady, StartFailed
from tailrace.request import FinishReason, RequestId, SamplingParams
from tailrace.worker.channel import EngineSpec, Submit
from tailrace.worker.engine_client import EngineClient, EngineState
from tailrace.worker.event_stream import EventStream
from tailrace.worker.restart import RestartPolicy

PREAMBLE = """
import os, socket, sys, time
from tailrace.engine.step import SchedulerStats, SequenceEvent
from tailrace.request import FinishReason
from tailrace.worker.channel import *
sock = socket.socket(fileno=int(sys.argv[sys.argv.index("--fd") + 1]))
parser = FrameParser()
pending = []
def receive():
    while not pending:
        data = sock.recv(65536)
        if not data:
            sys.exit(0)
        pending.extend(to_engine_decoder.decode(body) for body in parser.feed(data))
    return pending.pop(0)
def send(message):
    sock.sendall(encode_frame(message))
def ready(step_timeout_ms=60_000):
    memory = MemoryPlan(weights_bytes=0, kv_pool_bytes=0, scratch_bytes=0, available_bytes=0, kv_bytes_per_token=0,
                        num_blocks=0, kv_dtype="u8", kv_tokens=0)
    send(Ready(memory=memory, context_tokens_max=100, sequences_max=4, token_budget=8, itl_target_ms=None,
               step_timeout_ms=step_timeout_ms, num_threads=1, startup_ms={}))
def report(*events):
    send(StepReport(events=list(events), stats=SchedulerStats(num_running=1)))
assert isinstance(receive(), Start)
"""
ONE_RESTART = RestartPolicy(backoff_ms_first=1, failures_max=2)


def engine(script: str) -> tuple[str, ...]:
    return (sys.executable, "-P", "-c", PREAMBLE + textwrap.dedent(script))


def with_engine(
    spec: EngineSpec,
    script: str,
    body: Callable[[EngineClient], Awaitable[None]],
    policy: RestartPolicy = ONE_RESTART,
    start_timeout_s: float = 60.0,
) -> None:
    async def run() -> None:
        client = EngineClient(spec, policy=policy, argv=engine(script), start_timeout_s=start_timeout_s)
        try:
            await client.start()
            await body(client)
        finally:
            await client.close()
            assert client.num_open == 0

    asyncio.run(run())


def submit(client: EngineClient, name: str = "r", num_choices: int = 1) -> EventStream:
    return client.submit(
        Submit(
            request_id=RequestId(name),
            sequence_ids=client.new_sequence_ids(num_choices),
            prompt_token_ids=[1, 2, 3],
            params=SamplingParams(max_tokens=4),
            arrival_ns=0,
        )
    )


async def final_events(stream: EventStream) -> list[SequenceEvent]:
    return [event async for batch in stream for event in batch if event.finish_reason is not None]


async def until(client: EngineClient, state: EngineState) -> None:
    async with asyncio.timeout(60):
        while client.state is not state:
            await asyncio.sleep(0.01)


def died(events: list[SequenceEvent]) -> bool:
    return [(e.finish_reason, e.error_label) for e in events] == [(FinishReason.ERROR, "engine_died")] * len(events)


def test_a_start_that_ends_in_an_exit_names_the_code_and_what_the_child_said(spec: EngineSpec) -> None:
    async def body(_: EngineClient) -> None:
        pytest.fail("it never became ready")

    with pytest.raises(StartFailed, match=r"(?s)exit code 7.*no such library"):
        with_engine(spec, "print('no such library', file=sys.stderr); sys.exit(7)", body)


def test_a_fatal_frame_at_start_raises_the_error_it_names(spec: EngineSpec) -> None:
    async def run() -> None:
        script = "send(Fatal('model_refused', 'sliding window; use llama.cpp')); sys.exit(3)"
        client = EngineClient(spec, argv=engine(script))
        with pytest.raises(ModelRefused, match="use llama"):
            await client.start()
        assert client.state is EngineState.STOPPED
        with pytest.raises(NotReady):
            submit(client)

    asyncio.run(run())


def test_an_engine_that_says_nothing_while_starting_is_killed(spec: EngineSpec) -> None:
    async def body(_: EngineClient) -> None:
        pytest.fail("it never became ready")

    with pytest.raises(StartFailed, match="hung"):
        with_engine(spec, "receive()", body, start_timeout_s=2.0)


def test_a_start_given_up_leaves_no_engine(spec: EngineSpec) -> None:
    async def run() -> None:
        complaints: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: complaints.append(context))
        client = EngineClient(spec, argv=engine("receive()"))
        start = asyncio.create_task(client.start())
        async with asyncio.timeout(60):
            while client.pid is None:
                await asyncio.sleep(0.01)
        start.cancel()
        await asyncio.wait([start])
        assert start.cancelled()
        assert client.pid is None
        del client, start
        gc.collect()
        assert complaints == []

    asyncio.run(run())


def test_a_malformed_frame_ends_the_engine_and_its_streams_and_a_new_engine_starts(spec: EngineSpec) -> None:
    async def body(client: EngineClient) -> None:
        stream = submit(client, num_choices=3)
        finals = await final_events(stream)
        assert sorted(e.sequence_id for e in finals) == list(stream.sequence_ids)
        assert died(finals)
        await until(client, EngineState.READY)
        assert client.restarts_total == 1
        assert client.last_error is not None
        assert "malformed" in client.last_error

    with_engine(spec, "ready(); receive(); sock.sendall(b'\\x03\\0\\0\\0abc'); receive(); time.sleep(60)", body)


def test_a_sequence_that_ended_before_the_death_is_not_ended_again(spec: EngineSpec) -> None:
    script = """
        ready()
        first, second = receive().sequence_ids
        report(SequenceEvent(sequence_id=first, token_ids=(5,), finish_reason=FinishReason.STOP))
        os._exit(1)
    """

    async def body(client: EngineClient) -> None:
        finals = await final_events(submit(client, num_choices=2))
        assert [(e.finish_reason, e.error_label) for e in finals] == [
            (FinishReason.STOP, None),
            (FinishReason.ERROR, "engine_died"),
        ]

    with_engine(spec, script, body)


def test_an_engine_with_work_that_says_nothing_is_killed_as_hung(spec: EngineSpec) -> None:
    async def body(client: EngineClient) -> None:
        finals = await final_events(submit(client))
        assert died(finals)
        assert finals[0].error_message is not None
        assert "hung" in finals[0].error_message

    with_engine(spec, "ready(step_timeout_ms=200); receive(); receive()", body)


def test_an_idle_engine_owes_no_message(spec: EngineSpec) -> None:
    script = """
        ready(step_timeout_ms=50)
        while True:
            submitted = receive()
            report(SequenceEvent(sequence_id=submitted.sequence_ids[0], finish_reason=FinishReason.STOP))
    """

    async def body(client: EngineClient) -> None:
        pid = client.pid
        await asyncio.sleep(0.5)  # ten time-outs long
        assert [e.finish_reason for e in await final_events(submit(client))] == [FinishReason.STOP]
        assert client.pid == pid

    with_engine(spec, script, body)


def test_an_engine_that_dies_again_and_again_stays_down(spec: EngineSpec) -> None:
    async def body(client: EngineClient) -> None:
        await until(client, EngineState.STOPPED)
        assert client.restarts_total == 2
        assert client.pid is None
        with pytest.raises(NotReady, match="stopped"):
            submit(client)
        with pytest.raises(NotReady):
            await client.read_steps()

    with_engine(spec, "ready(); os._exit(9)", body, RestartPolicy(backoff_ms_first=1, failures_max=3))


def test_close_ends_every_stream_once_and_twice_is_as_good_as_once(spec: EngineSpec) -> None:
    async def body(client: EngineClient) -> None:
        streams = [submit(client, str(i)) for i in range(4)]
        await client.close()
        await client.close()
        assert died([e for stream in streams for e in await final_events(stream)])
        assert client.state is EngineState.CLOSED
        with pytest.raises(Draining):
            submit(client)

    with_engine(spec, "ready()\nwhile not isinstance(receive(), Stop): pass", body)


def test_an_engine_that_ignores_stop_is_killed_at_close(spec: EngineSpec) -> None:
    async def body(client: EngineClient) -> None:
        await client.close()
        assert client.pid is None

    with_engine(spec, "ready()\nwhile True: time.sleep(1)", body)


def test_a_draining_client_refuses_new_work_and_waits_for_what_runs(spec: EngineSpec) -> None:
    script = """
        ready()
        submitted = receive()
        assert isinstance(receive(), Cancel)
        report(SequenceEvent(sequence_id=submitted.sequence_ids[0], finish_reason=FinishReason.CANCELLED))
        receive()
    """

    async def body(client: EngineClient) -> None:
        submit(client, "running")
        client.begin_drain()
        with pytest.raises(Draining):
            submit(client, "late")
        drained = asyncio.create_task(client.drained())
        await asyncio.sleep(0)
        assert not drained.done()
        client.cancel(RequestId("running"))
        async with asyncio.timeout(60):
            await drained
        assert client.num_open == 0

    with_engine(spec, script, body)


def test_a_broken_step_callback_costs_no_stream_its_events(spec: EngineSpec) -> None:
    script = """
        ready()
        while True:
            submitted = receive()
            report(SequenceEvent(sequence_id=submitted.sequence_ids[0], finish_reason=FinishReason.STOP))
    """

    async def body(client: EngineClient) -> None:
        reported: list[str] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _loop, context: reported.append(context["message"]))
        client.on_step(lambda _report: 1 // 0)
        for name in "ab":
            assert [e.finish_reason for e in await final_events(submit(client, name))] == [FinishReason.STOP]
        assert reported == ["a step callback failed"] * 2

    with_engine(spec, script, body)


def test_a_step_log_query_fails_when_the_engine_dies_before_its_answer(spec: EngineSpec) -> None:
    async def body(client: EngineClient) -> None:
        with pytest.raises(EngineDied):
            await client.read_steps()

    with_engine(spec, "ready(); receive(); os._exit(1)", body)


def test_sequence_ids_are_never_given_out_twice(spec: EngineSpec) -> None:
    client = EngineClient(spec)
    given = [i for n in (1, 3, 2) for i in client.new_sequence_ids(n)]
    assert len(set(given)) == 6
