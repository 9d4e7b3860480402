"""The engine process for real: a child interpreter with the scheduler and the modeled executor in real time.

What happens to streams when it is killed, stopped, overloaded, left or fed nonsense. No timed asserts: every wait ends
on an event, with a bound that only a hang reaches.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
import uvloop

from tailrace.clock import NS_PER_MS, monotonic_ns
from tailrace.engine.config import EngineConfig
from tailrace.engine.step import SequenceEvent
from tailrace.errors import ModelRefused, StartFailed
from tailrace.request import FinishReason, RequestId, SamplingParams, SequenceId
from tailrace.worker.channel import (
    EngineSpec,
    Fatal,
    FrameParser,
    ModeledFaults,
    ModeledSpec,
    Progress,
    Ready,
    Start,
    StepReport,
    Stop,
    Submit,
    encode_frame,
    from_engine_decoder,
)
from tailrace.worker.engine_client import EngineClient, EngineState
from tailrace.worker.event_stream import EventStream
from tailrace.worker.restart import RestartPolicy

WAIT_S = 60
DIE, HANG, FAIL = 991, 992, 993
FAULTS = ModeledFaults(die_token=DIE, hang_token=HANG, fail_token=FAIL)
Finals = dict[int, tuple[FinishReason | None, str | None]]


def modeled(
    *,
    num_blocks: int = 128,
    step_fixed_ms: float = 1.0,
    faults: ModeledFaults = FAULTS,
    engine: EngineConfig | None = None,
    step_timeout_ms_min: int = 60_000,
) -> EngineSpec:
    executor = ModeledSpec(
        num_blocks=num_blocks,
        vocab_size=1_000,
        context_tokens_max=1_024,
        step_fixed_ms=step_fixed_ms,
        faults=faults,
    )
    return EngineSpec(
        executor=executor,
        engine=engine or EngineConfig(),
        end_token_ids=(0,),
        step_timeout_ms_min=step_timeout_ms_min,
    )


def with_engine(
    spec: EngineSpec,
    body: Callable[[EngineClient], Awaitable[None]],
    policy: RestartPolicy | None = None,
    run_loop: Callable[[Coroutine[Any, Any, None]], None] = asyncio.run,
) -> None:
    """Runs `body` against a started engine; afterwards nothing is left open and no process is left."""

    async def run() -> None:
        client = EngineClient(spec, policy=policy or RestartPolicy(backoff_ms_first=1))
        try:
            await client.start()
            async with asyncio.timeout(2 * WAIT_S):
                await body(client)
        finally:
            await client.close()
        assert client.num_open == 0
        assert client.pid is None

    run_loop(run())


def submit(
    client: EngineClient,
    name: str = "r",
    *,
    prompt: list[int] | None = None,
    max_tokens: int = 8,
    num_choices: int = 1,
    deadline_ns: int | None = None,
) -> EventStream:
    return client.submit(
        Submit(
            request_id=RequestId(name),
            sequence_ids=client.new_sequence_ids(num_choices),
            prompt_token_ids=prompt or [1, 2, 3, len(name), *name.encode()],
            params=SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0),
            arrival_ns=monotonic_ns(),
            deadline_ns=deadline_ns,
        )
    )


async def events_of(stream: EventStream) -> list[SequenceEvent]:
    return [event async for batch in stream for event in batch]


async def finals_of(stream: EventStream) -> Finals:
    """Asserts that each sequence ends exactly once and nothing follows its end."""
    finals: Finals = {}
    async for batch in stream:
        for event in batch:
            assert event.sequence_id not in finals, "an event after the final one"
            if event.finish_reason is not None:
                finals[event.sequence_id] = (event.finish_reason, event.error_label)
    assert sorted(finals) == sorted(stream.sequence_ids), "a sequence did not end"
    return finals


async def first_token(stream: EventStream) -> None:
    async for batch in stream:
        if any(event.token_ids for event in batch):
            return
    raise AssertionError("the stream ended without a token")


async def report_where(client: EngineClient, holds: Callable[[StepReport], bool]) -> StepReport:
    """The next report of which `holds`."""
    found: asyncio.Future[StepReport] = asyncio.get_running_loop().create_future()

    def look(report: StepReport) -> None:
        if not found.done() and holds(report):
            found.set_result(report)

    client.on_step(look)
    return await found


async def all_blocks_free(client: EngineClient) -> None:
    if client.stats.num_blocks_held or client.stats.num_running or client.stats.num_waiting:
        await report_where(client, lambda r: r.stats.num_blocks_held == r.stats.num_running == r.stats.num_waiting == 0)


async def state_reached(client: EngineClient, state: EngineState) -> None:
    async with asyncio.timeout(WAIT_S):
        while client.state is not state:
            await asyncio.sleep(0.01)


def only(finals: Finals) -> set[tuple[FinishReason | None, str | None]]:
    return set(finals.values())


DIED = {(FinishReason.ERROR, "engine_died")}


# A normal run


def test_every_sequence_gets_its_tokens_and_one_end() -> None:
    async def body(client: EngineClient) -> None:
        streams = [submit(client, f"r{i}", max_tokens=5 + i, num_choices=1 + i % 3) for i in range(12)]
        for i, events in enumerate(await asyncio.gather(*map(events_of, streams))):
            for sequence_id in streams[i].sequence_ids:
                own = [event for event in events if event.sequence_id == sequence_id]
                assert sum(len(event.token_ids) for event in own) == 5 + i
                assert [e.finish_reason for e in own if e.finish_reason] == [FinishReason.LENGTH]
        await all_blocks_free(client)
        assert client.num_open == 0

    with_engine(modeled(), body)


def test_the_same_request_gets_the_same_text_from_a_restarted_engine() -> None:
    async def tokens(client: EngineClient) -> list[int]:
        return [t for event in await events_of(submit(client, "same", max_tokens=20)) for t in event.token_ids]

    async def body(client: EngineClient) -> None:
        before = await tokens(client)
        assert client.pid is not None
        reborn = asyncio.create_task(restarted(client))
        os.kill(client.pid, signal.SIGKILL)
        await reborn
        assert await tokens(client) == before

    with_engine(modeled(), body)


async def restarted(client: EngineClient) -> None:
    before = client.restarts_total
    async with asyncio.timeout(WAIT_S):
        while client.restarts_total == before or client.state is not EngineState.READY:
            await asyncio.sleep(0.01)


def test_ready_says_what_was_resolved_and_how_long_each_phase_took() -> None:
    async def run() -> None:
        client = EngineClient(modeled(num_blocks=77, engine=EngineConfig(sequences_max=5, itl_target_ms=40)))
        phases: list[Progress] = []
        try:
            ready = await client.start(phases.append)
            assert (ready.sequences_max, ready.itl_target_ms, ready.context_tokens_max) == (5, 40, 1_024)
            assert ready.memory.num_blocks == 77
            assert [phase.phase for phase in phases] == list(ready.startup_ms)
            assert ready.step_timeout_ms >= 60_000
        finally:
            await client.close()

    asyncio.run(run())


def test_the_step_log_tells_each_step_of_a_run() -> None:
    async def body(client: EngineClient) -> None:
        await finals_of(submit(client, max_tokens=6))
        records = await client.read_steps()
        assert len(records) == 6
        assert [record.step_id for record in records] == list(range(1, 7))
        assert [record.num_decode_rows for record in records] == [0, 1, 1, 1, 1, 1]
        assert records[0].num_prefill_tokens == records[0].num_tokens == 5
        assert records[1].num_kv_tokens_read == 6
        for record in records:
            assert record.outcome == "done"
            assert record.plan_ns + record.kernel_ns + record.commit_ns <= record.duration_ns
            assert record.predicted_ns is not None

    with_engine(modeled(), body)


# Cancels, finishes, deadlines


def test_a_cancelled_prefill_or_decode_ends_once_and_gives_its_blocks_back() -> None:
    async def body(client: EngineClient) -> None:
        decoding = submit(client, "decode", max_tokens=900)
        await first_token(decoding)
        prefilling = submit(client, "prefill", prompt=list(range(1, 901)), max_tokens=4)
        await report_where(client, lambda r: r.record is not None and r.record.num_prefill_tokens > 0)
        for stream in (prefilling, decoding):
            client.cancel(stream.request_id)
        for stream in (prefilling, decoding):
            assert only(await finals_of(stream)) == {(FinishReason.CANCELLED, "cancelled")}
        await all_blocks_free(client)

    with_engine(modeled(step_fixed_ms=5), body)


def test_a_cancelled_waiting_request_ends_once_and_never_ran() -> None:
    async def body(client: EngineClient) -> None:
        running = submit(client, "running", max_tokens=900)
        await first_token(running)
        waiting = submit(client, "waiting", num_choices=2)
        client.cancel(waiting.request_id)
        events = await events_of(waiting)
        assert [e.finish_reason for e in events] == [FinishReason.CANCELLED] * 2
        assert all(not e.token_ids for e in events)
        running.close()
        await all_blocks_free(client)

    with_engine(modeled(engine=EngineConfig(sequences_max=1)), body)


def test_closing_a_stream_cancels_its_request() -> None:
    async def body(client: EngineClient) -> None:
        stream = submit(client, max_tokens=1_000, num_choices=3)
        await first_token(stream)
        stream.close()
        assert await events_of(stream) == []
        await client.drained()
        await all_blocks_free(client)

    with_engine(modeled(), body)


def test_a_finish_ends_the_stream_at_once_and_frees_its_blocks() -> None:
    async def body(client: EngineClient) -> None:
        stream = submit(client, max_tokens=900)
        await first_token(stream)
        client.finish(stream.sequence_ids[0], FinishReason.STOP, tokens_kept=1)
        assert client.num_open == 0
        assert only(await finals_of(stream)) == {(FinishReason.STOP, None)}
        await all_blocks_free(client)

    with_engine(modeled(), body)


def test_a_deadline_ends_a_request_that_still_waits() -> None:
    async def body(client: EngineClient) -> None:
        running = submit(client, "running", max_tokens=1_000)
        await first_token(running)
        late = submit(client, "late", deadline_ns=monotonic_ns() + 20 * NS_PER_MS)
        assert only(await finals_of(late)) == {(FinishReason.DEADLINE, "deadline_exceeded")}
        running.close()
        await all_blocks_free(client)

    with_engine(modeled(engine=EngineConfig(sequences_max=1)), body)


def test_callers_who_connect_and_leave_do_not_stop_the_honest_ones() -> None:
    leavers_max = 400

    async def body(client: EngineClient) -> None:
        honest = [submit(client, f"honest{i}", max_tokens=30) for i in range(2)]
        finals = asyncio.gather(*map(finals_of, honest))
        stepped = asyncio.Event()
        client.on_step(lambda _report: stepped.set())
        leaver = submit(client, "leaver", prompt=[5] * 600)
        for number in range(leavers_max):
            # The worst they can do: be most of each step, and leave while it runs, with the next one in place.
            stepped.clear()
            await stepped.wait()
            following = submit(client, f"leaver{number}", prompt=[6 + number] * 600)
            await asyncio.sleep(0.002)
            leaver.close()
            leaver = following
            if finals.done():
                break
        leaver.close()
        assert finals.done(), f"{leavers_max} leavers kept the honest from ending"
        for one in await finals:
            assert only(one) == {(FinishReason.LENGTH, None)}
        assert client.stats.steps_cut_total > 0, "the leavers had no effect: the test shows nothing"
        await client.drained()
        await all_blocks_free(client)

    with_engine(modeled(step_fixed_ms=40), body)


def test_a_step_that_serves_only_a_cancelled_request_is_cut() -> None:
    async def body(client: EngineClient) -> None:
        stream = submit(client, max_tokens=4)
        while client.stats.steps_cut_total == 0:
            client.cancel(stream.request_id)
            assert only(await finals_of(stream)) == {(FinishReason.CANCELLED, "cancelled")}
            stream = submit(client, max_tokens=4)
            await asyncio.sleep(0.05)

    with_engine(modeled(step_fixed_ms=20_000), body)


# Refusals


def test_more_waiting_than_the_bound_is_refused_as_overloaded() -> None:
    async def body(client: EngineClient) -> None:
        running = submit(client, "running", max_tokens=1_000)
        await first_token(running)
        two = submit(client, "two", num_choices=2)
        # One place is left for three choices: all of them are refused, none is half accepted.
        refused = submit(client, "three", num_choices=3)
        assert only(await finals_of(refused)) == {(FinishReason.ERROR, "overloaded")}
        fits = submit(client, "one")
        running.close()
        assert only(await finals_of(two)) == only(await finals_of(fits)) == {(FinishReason.LENGTH, None)}
        await all_blocks_free(client)

    with_engine(modeled(engine=EngineConfig(sequences_max=1, waiting_max=3)), body)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "label"),
    [([1] * 2_000, 1, "context_length_exceeded"), ([1] * 500, 400, "kv_exhausted")],
)
def test_what_can_never_fit_is_refused_with_the_error_it_is(prompt: list[int], max_tokens: int, label: str) -> None:
    async def body(client: EngineClient) -> None:
        stream = submit(client, prompt=prompt, max_tokens=max_tokens, num_choices=2)
        assert only(await finals_of(stream)) == {(FinishReason.ERROR, label)}
        assert only(await finals_of(submit(client, "next"))) == {(FinishReason.LENGTH, None)}

    with_engine(modeled(num_blocks=16), body)


def test_a_step_that_fails_ends_the_culprit_alone() -> None:
    async def body(client: EngineClient) -> None:
        good = submit(client, "good", max_tokens=30)
        await first_token(good)
        bad = submit(client, "bad", prompt=[FAIL, 2, 3])
        assert only(await finals_of(bad)) == {(FinishReason.ERROR, "engine_failed")}
        assert only(await finals_of(good)) == {(FinishReason.LENGTH, None)}
        assert client.restarts_total == 0

    with_engine(modeled(), body)


# Deaths


@pytest.mark.parametrize("run_loop", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_kill_ends_each_running_stream_once_and_a_new_engine_serves(
    run_loop: Callable[[Coroutine[Any, Any, None]], None],
) -> None:
    async def body(client: EngineClient) -> None:
        causes: list[str] = []
        client.on_end(causes.append)
        streams = [submit(client, f"r{i}", max_tokens=900, num_choices=2) for i in range(3)]
        await first_token(streams[0])
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        for stream in streams:
            assert only(await finals_of(stream)) == DIED
        await state_reached(client, EngineState.READY)
        assert client.restarts_total == 1
        assert client.stats.num_running == 0
        assert client.last_error is not None
        assert "signal 9" in client.last_error
        assert causes == [client.last_error]
        assert only(await finals_of(submit(client, "after"))) == {(FinishReason.LENGTH, None)}

    with_engine(modeled(), body, run_loop=run_loop)


def test_an_engine_that_dies_in_a_step_takes_its_streams_only() -> None:
    async def body(client: EngineClient) -> None:
        assert only(await finals_of(submit(client, "deadly", prompt=[DIE, 1]))) == DIED
        await state_reached(client, EngineState.READY)
        assert only(await finals_of(submit(client, "after"))) == {(FinishReason.LENGTH, None)}

    with_engine(modeled(), body)


def test_a_stopped_engine_is_taken_for_hung_killed_and_replaced() -> None:
    async def body(client: EngineClient) -> None:
        stream = submit(client, max_tokens=1_000)
        await first_token(stream)
        stopped = client.pid
        assert stopped is not None
        os.kill(stopped, signal.SIGSTOP)
        assert only(await finals_of(stream)) == DIED
        assert client.last_error is not None
        assert "hung" in client.last_error
        await state_reached(client, EngineState.READY)
        assert client.pid != stopped
        with pytest.raises(ProcessLookupError):
            os.kill(stopped, 0)

    with_engine(modeled(step_timeout_ms_min=3_000), body)


def test_a_step_that_never_ends_is_taken_for_hung() -> None:
    async def body(client: EngineClient) -> None:
        assert only(await finals_of(submit(client, "hangs", prompt=[HANG, 1]))) == DIED
        assert client.last_error is not None
        assert "hung" in client.last_error

    with_engine(modeled(step_timeout_ms_min=1_000), body)


def test_an_engine_that_dies_again_and_again_stays_down() -> None:
    async def body(client: EngineClient) -> None:
        for _ in range(3):
            assert only(await finals_of(submit(client, "deadly", prompt=[DIE, 1]))) == DIED
            async with asyncio.timeout(WAIT_S):
                while client.state not in (EngineState.READY, EngineState.STOPPED):
                    await asyncio.sleep(0.01)
        assert client.state is EngineState.STOPPED
        assert client.restarts_total == 2

    with_engine(modeled(), body, RestartPolicy(backoff_ms_first=1, failures_max=3))


def test_close_in_the_middle_of_a_long_step_leaves_no_process() -> None:
    async def body(client: EngineClient) -> None:
        stream = submit(client, max_tokens=4)
        await client.close()
        assert only(await finals_of(stream)) == DIED

    with_engine(modeled(step_fixed_ms=100_000), body)


# Start


def test_a_refused_model_is_the_error_of_the_start() -> None:
    async def run() -> None:
        client = EngineClient(modeled(faults=ModeledFaults(start_label="model_refused")))
        with pytest.raises(ModelRefused):
            await client.start()
        assert client.state is EngineState.STOPPED

    asyncio.run(run())


def test_a_configuration_that_contradicts_itself_is_the_error_of_the_start() -> None:
    async def run() -> None:
        client = EngineClient(modeled(engine=EngineConfig(sequences_max=64, token_budget=8)))
        with pytest.raises(Exception, match=r"engine\.token_budget") as caught:
            await client.start()
        assert caught.type.__name__ == "ConfigError"

    asyncio.run(run())


def test_a_terminal_interrupt_does_not_reach_the_engine() -> None:
    async def body(client: EngineClient) -> None:
        assert client.pid is not None
        assert os.getsid(client.pid) == client.pid, "a session of its own"
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(client.pid, number)
        assert only(await finals_of(submit(client))) == {(FinishReason.LENGTH, None)}
        assert client.restarts_total == 0

    with_engine(modeled(), body)


# The child alone, without the client


class BareChild:
    """An engine process whose socket the test holds."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(WAIT_S)
        fd = theirs.fileno()
        command = (sys.executable, "-P", "-m", "tailrace.worker.engine_process", "--fd", str(fd))
        self.process = subprocess.Popen(command, pass_fds=(fd,), stderr=subprocess.PIPE)
        theirs.close()
        self._parser = FrameParser()
        self._next_id = 0

    def submit(self, prompt: list[int], max_tokens: int) -> None:
        self._next_id += 1
        message = Submit(
            request_id=RequestId(f"r{self._next_id}"),
            sequence_ids=(SequenceId(self._next_id),),
            prompt_token_ids=prompt,
            params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            arrival_ns=0,
        )
        self.socket.sendall(encode_frame(message))

    def read_until(self, kind: type) -> None:
        while not any(isinstance(message, kind) for message in self._receive()):
            pass

    def read_until_silent(self, silence_s: float) -> None:
        self.socket.settimeout(silence_s)
        with contextlib.suppress(TimeoutError):
            while self._receive():
                pass

    def messages_to_the_end(self) -> list[object]:
        messages: list[object] = []
        while received := self._receive():
            messages += received
        return messages

    def _receive(self) -> list[object]:
        """At least one message; none at the end."""
        messages: list[object] = []
        while not messages and (data := self.socket.recv(65_536)):
            messages += map(from_engine_decoder.decode, self._parser.feed(data))
        return messages

    def end(self) -> int:
        self.socket.close()
        code = self.process.wait(WAIT_S)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code


@pytest.mark.parametrize("started", [False, True])
def test_a_malformed_frame_ends_the_child_with_a_labelled_error(started: bool) -> None:
    child = BareChild()
    child.socket.sendall((encode_frame(Start(modeled())) if started else b"") + b"\x05\0\0\0hello")
    fatal = child.messages_to_the_end()[-1]
    assert isinstance(fatal, Fatal)
    assert "malformed" in fatal.message
    assert child.end() != 0


def test_a_first_frame_that_is_no_start_ends_the_child() -> None:
    child = BareChild()
    child.submit([1, 2], max_tokens=1)
    fatal = child.messages_to_the_end()[-1]
    assert isinstance(fatal, Fatal)
    assert fatal.error_label == StartFailed("").row.label
    assert child.end() == StartFailed("").row.exit_code


def test_an_idle_child_leaves_when_the_app_is_gone() -> None:
    child = BareChild()
    child.socket.sendall(encode_frame(Start(modeled())))
    child.read_until(Ready)
    assert child.end() == 0


def test_a_child_whose_messages_nobody_read_leaves_in_good_order() -> None:
    child = BareChild()
    child.socket.sendall(encode_frame(Start(modeled())))
    assert child.socket.recv(1, socket.MSG_PEEK)  # unread, so its end is a reset and not an end of file
    assert child.end() == 0


def test_a_busy_child_leaves_when_the_app_is_gone() -> None:
    child = BareChild()
    child.socket.sendall(encode_frame(Start(modeled())))
    child.read_until(Ready)
    child.submit([1, 2], max_tokens=1_000)
    child.read_until(StepReport)
    assert child.end() == 0


def test_a_child_in_a_step_that_never_ends_leaves_when_the_app_is_gone() -> None:
    child = BareChild()
    child.socket.sendall(encode_frame(Start(modeled())))
    child.read_until(Ready)
    child.submit([HANG, 2], max_tokens=1)
    child.read_until_silent(1.0)
    assert child.end() == 1, "the reader thread ended the process"


def test_the_child_leaves_on_stop_with_exit_code_zero() -> None:
    child = BareChild()
    child.socket.sendall(encode_frame(Start(modeled())) + encode_frame(Stop()))
    assert not any(isinstance(message, Fatal) for message in child.messages_to_the_end())
    assert child.end() == 0
