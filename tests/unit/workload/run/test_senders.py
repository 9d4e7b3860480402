"""Sender processes: together they send the plan once, and none is left over however the run ends."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from null_service import null_service

from tailrace.errors import SenderFailed
from tailrace.measure.record import Outcome, RequestRecord
from tailrace.workload.draw import draw_plan
from tailrace.workload.job import BodyOptions, Endpoint, PlanSource, Progress, Realisation, SendJob
from tailrace.workload.run.senders import SendResult, run_senders
from tailrace.workload.send.frames import encode_frame
from tailrace.workload.send.self_check import client_stats

TOML = """
name = "short"
[[cohorts]]
prompt_tokens = { law = "constant", value = 20 }
output_tokens = { law = "constant", value = 4 }
"""


@pytest.fixture(scope="module")
def null_url() -> Iterator[str]:
    with null_service() as url:
        yield url


def make_jobs(url: str, folder: Path, number: int, *, arrivals: str = "poisson:100", **window: float) -> list[SendJob]:
    source = PlanSource(
        workload_toml=TOML,
        arrivals=arrivals,
        seed=3,
        run_id="run",
        duration_s=window.get("duration_s"),
        num_requests=int(window["num_requests"]) if "num_requests" in window else None,
        warmup_s=window.get("warmup_s", 0.1),
    )
    return [
        SendJob(
            source=source,
            endpoint=Endpoint(base_url=url, model="null"),
            realisation=Realisation(words=("one", "two", "three")),
            options=BodyOptions(),
            shard=shard,
            num_shards=number,
            timeout_ns=60_000_000_000,
            num_in_flight_max=1_000,
            rows_path=str(folder / f"rows-{shard}.jsonl"),
        )
        for shard in range(number)
    ]


def records_of(result: SendResult) -> list[RequestRecord]:
    decode = msgspec.json.Decoder(RequestRecord).decode_lines
    return [record for path in result.rows_paths for record in decode(Path(path).read_bytes())]


def test_two_senders_send_the_plan_once_between_them(null_url: str, tmp_path: Path) -> None:
    heard: list[tuple[int, Progress]] = []
    jobs = make_jobs(null_url, tmp_path, 2, num_requests=60)
    result = asyncio.run(run_senders(jobs, lambda shard, progress: heard.append((shard, progress))))
    records = records_of(result)
    plan = draw_plan(jobs[0].source)
    planned = {}
    for index in range(len(records) + 100):
        at_ns = plan.scheduled_ns(index)
        assert at_ns is not None
        planned[plan.session(index).turns[0].request_id] = result.origin_ns + at_ns
    assert len({record.request_id for record in records}) == len(records)
    assert all(record.scheduled_ns == planned[record.request_id] for record in records)
    window = [r for r in records if plan.window_start_ns <= r.scheduled_ns - result.origin_ns < result.window_end_ns]
    assert [record.outcome for record in window] == [Outcome.OK] * 60
    assert {record.sender for record in window} == {0, 1}
    assert all(len(record.chunk_gaps_ns) == 4 for record in window)
    assert not result.was_stopped
    assert {shard for shard, _ in heard} == {0, 1}
    stats = client_stats(result.finished)
    assert stats.num_senders == 2
    assert stats.num_connections_opened + stats.num_connections_reused >= len(window)
    assert all(each.chunk_lag_ns and min(each.chunk_lag_ns) >= 0 for each in result.finished)


def test_a_closed_run_by_number_has_its_requests_in_the_window(null_url: str, tmp_path: Path) -> None:
    jobs = make_jobs(null_url, tmp_path, 2, arrivals="closed:4", num_requests=30)
    result = asyncio.run(run_senders(jobs))
    window = [r for r in records_of(result) if 100_000_000 <= r.scheduled_ns - result.origin_ns < result.window_end_ns]
    assert len(window) >= 30
    assert {record.outcome for record in window} == {Outcome.OK}
    assert len({each.window_end_ns for each in result.finished}) == 1


def test_a_run_that_is_stopped_keeps_its_rows(null_url: str, tmp_path: Path) -> None:
    async def run() -> SendResult:
        stop = asyncio.Event()
        jobs = make_jobs(null_url, tmp_path, 2, duration_s=600)
        return await run_senders(jobs, lambda _, progress: stop.set() if progress.num_issued else None, stop)

    result = asyncio.run(run())
    records = records_of(result)
    assert result.was_stopped
    assert records
    assert sum(each.num_records for each in result.finished) == len(records)


def children() -> list[int]:
    """Sender processes of this one."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                is_sender = b"sender_process" in (entry / "cmdline").read_bytes()
            except (OSError, IndexError):
                continue
            if parent == os.getpid() and is_sender:
                found.append(int(entry.name))
    return found


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_one_sender_that_is_ended_ends_the_run_and_leaves_none(
    number: signal.Signals, null_url: str, tmp_path: Path
) -> None:
    killed: list[int] = []

    def kill_one(_: int, progress: Progress) -> None:
        if progress.num_issued and not killed:
            killed.append(children()[0])
            os.kill(killed[0], number)

    jobs = make_jobs(null_url, tmp_path, 2, duration_s=600)
    if number is signal.SIGKILL:
        with pytest.raises(SenderFailed, match="ended by signal 9"):
            asyncio.run(run_senders(jobs, kill_one))
    else:
        result = asyncio.run(run_senders(jobs, kill_one))
        assert result.was_stopped
        assert records_of(result)
    assert killed
    assert children() == []


def test_ctrl_c_in_the_terminal_reaches_the_parent_alone(null_url: str, tmp_path: Path) -> None:
    """A sender that starts just then would die of it before it can say anything."""
    groups: list[int] = []

    def look(_: int, __: Progress) -> None:
        groups.extend(os.getpgid(child) for child in children())

    asyncio.run(run_senders(make_jobs(null_url, tmp_path, 1, duration_s=1.0), look))
    assert groups
    assert os.getpgrp() not in groups


def test_a_plan_that_cannot_be_drawn_is_said_before_anything_is_sent(null_url: str, tmp_path: Path) -> None:
    jobs = make_jobs(null_url, tmp_path, 1, arrivals="sometimes", num_requests=1)
    with pytest.raises(SenderFailed, match="sometimes"):
        asyncio.run(run_senders(jobs))
    assert children() == []


def test_rows_that_cannot_be_written_are_said(null_url: str, tmp_path: Path) -> None:
    jobs = make_jobs(null_url, tmp_path / "absent", 1, num_requests=1)
    with pytest.raises(SenderFailed, match="cannot be written"):
        asyncio.run(run_senders(jobs))


def test_a_sender_ends_when_its_parent_is_gone(null_url: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tailrace.workload.send.sender_process"]
    (job,) = make_jobs(null_url, tmp_path, 1, duration_s=600)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(encode_frame(job))
        child.stdin.flush()
        assert child.stdout.read(4)  # Ready.
        child.stdin.close()
        assert child.wait(20) == 1
