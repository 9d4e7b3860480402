"""One measured run against a service that costs nothing: real processes, real HTTP, rows that a report is made of."""

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from live_worker import write_text_model
from null_service import null_service

from tailrace.errors import ClientFailed, ConfigError
from tailrace.measure.build import build_report
from tailrace.measure.record import Outcome, RequestRecord, TokenCount
from tailrace.measure.rows import read_records, read_rows
from tailrace.measure.run_info import NullRun
from tailrace.measure.slo import parse_slo
from tailrace.workload.draw import draw_plan
from tailrace.workload.job import AnswerText, Endpoint, Realisation, SendJob, texts_path
from tailrace.workload.run import calibration, measured_run
from tailrace.workload.run.calibration import keeps_schedule, null_source
from tailrace.workload.run.live import LiveNumbers
from tailrace.workload.run.machine_facts import machine_facts
from tailrace.workload.run.measured_run import Measured, measure, scheduled_gaps_ns
from tailrace.workload.run.merge import merged_lines
from tailrace.workload.run.request import BenchRequest, repeat
from tailrace.workload.run.second_count import PinnedTokenizer, Recount, open_tokenizer, recount, recount_with
from tailrace.workload.run.warm_up import OUTPUT_TOKENS, shapes

TOML = """
name = "short"
[[cohorts]]
prompt_tokens = { law = "uniform", low = 20, high = 60 }
output_tokens = { law = "constant", value = 12 }
"""


@pytest.fixture(scope="module")
def null_url() -> Iterator[str]:
    with null_service() as url:
        yield url


def make_request(url: str, **more: object) -> BenchRequest:
    fields: dict[str, object] = {
        "url": url,
        "workload_toml": TOML,
        "arrivals": "poisson:60",
        "run_id": "run",
        "seed": 5,
        "num_requests": 60,
        "warmup_s": 0.2,
        "calibrates": False,
        "num_senders": 1,
    }
    return BenchRequest(**(fields | more))  # type: ignore[arg-type]


def run(
    request: BenchRequest,
    path: Path,
    *,
    show: Callable[[LiveNumbers, asyncio.Event], None] = lambda _numbers, _stop: None,
    recounting: Recount | None = None,
) -> Measured:
    async def measured() -> Measured:
        stop = asyncio.Event()
        return await measure(request, path, show=lambda n: show(n, stop), stop=stop, recount=recounting)

    return asyncio.run(measured())


# A run


@pytest.mark.parametrize("num_senders", [1, 2])
def test_rows_of_a_run_hold_its_window_once_in_scheduled_order(null_url: str, tmp_path: Path, num_senders: int) -> None:
    path = tmp_path / "rows.jsonl.gz"
    measured = run(make_request(null_url, num_senders=num_senders), path)
    records = list(read_records(path))
    scheduled = [record.scheduled_ns for record in records]
    assert scheduled == sorted(scheduled)
    assert len({record.request_id for record in records}) == len(records)
    info, table = read_rows(path)
    assert info == measured.info
    assert {record.sender for record in records} == set(range(num_senders))
    report = build_report(info, table)
    assert report.num_requests == 60
    assert report.outcomes == {"ok": 60}
    assert info.client is not None
    assert info.client.num_senders == num_senders


def test_the_header_says_what_was_sent(null_url: str, tmp_path: Path) -> None:
    request = make_request(null_url, api_key="hush", headers={"X-Secret": "quiet"}, slo=parse_slo("ttft_ms_p50<=900"))
    path = tmp_path / "rows.jsonl"
    info = run(request, path).info
    assert info is not None
    plan = draw_plan(request.source())
    assert info.schedule_sha256 == plan.schedule_sha256
    assert (info.workload, info.arrivals, info.seed) == ("short", "poisson:60", 5)
    assert info.window_end_ns == plan.window_end_ns
    assert len(info.scheduled_gaps_ns) == 59
    assert sum(info.scheduled_gaps_ns) < info.window_end_ns - info.window_start_ns
    assert info.machine["kernel"]
    text = path.read_text(encoding="utf-8")
    assert "hush" not in text
    assert "quiet" not in text


def test_the_client_is_held_against_a_null_server_by_the_same_schedule(null_url: str, tmp_path: Path) -> None:
    phases: list[str] = []
    request = make_request(null_url, calibrates=True, num_requests=None, duration_s=0.5)
    info = run(request, tmp_path / "rows.jsonl", show=lambda n, _: phases.append(n.phase)).info
    assert info is not None
    assert info.client is not None
    assert info.client.null_run is not None
    assert info.client.null_run.num_requests > 5
    assert "measuring this client against a null server" in phases


def test_a_service_that_takes_long_to_answer_may_be_loading(
    null_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measured_run, "QUIET_S", 0.0)
    phases: list[str] = []
    run(make_request(null_url, num_requests=1), tmp_path / "rows.jsonl", show=lambda n, _: phases.append(n.phase))
    assert f"asking {null_url}: still waiting; the service may be loading its model" in phases


def test_repeats_of_one_load_share_a_null_run_and_another_rate_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three runs: a rate, the same with another draw and text, another rate."""
    measured: list[int] = []

    async def measure_null(jobs: list[SendJob], _: asyncio.Event) -> NullRun:
        measured.append(len(jobs))
        return NullRun(num_requests=9, ttft_ms_p99=1.0, send_lag_ms_p99=1e6, chunk_lag_ms_p99=1.0)

    monkeypatch.setattr(calibration, "null_run", measure_null)
    monkeypatch.setattr(calibration, "_known", {})
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(5))
    first = make_request("http://x", arrivals="poisson:7")

    async def senders_of(request: BenchRequest) -> int:
        def jobs(num: int, name: str) -> list[SendJob]:
            return [
                SendJob(
                    source=request.source(),
                    endpoint=Endpoint(base_url=request.url, model="m"),
                    realisation=Realisation(words=("one",)),
                    options=request.options,
                    shard=shard,
                    num_shards=num,
                    timeout_ns=1,
                    num_in_flight_max=1,
                    rows_path=f"{name}-{shard}",
                )
                for shard in range(num)
            ]

        return (await calibration.calibrated(jobs, None, request.slo, asyncio.Event()))[0]

    for request in (first, repeat(first, 1)):
        assert asyncio.run(senders_of(request)) == 5
    assert measured == [1, 2, 4, 5]
    asyncio.run(senders_of(msgspec.structs.replace(first, arrivals="poisson:8")))
    assert measured == [1, 2, 4, 5] * 2


def test_more_senders_are_taken_only_where_one_is_late() -> None:
    late = NullRun(num_requests=9, ttft_ms_p99=1.0, send_lag_ms_p99=5.0, chunk_lag_ms_p99=1.0)
    assert keeps_schedule(late, parse_slo("ttft_ms_p99<=300"))
    assert not keeps_schedule(late, parse_slo("ttft_ms_p99<=200"))
    assert not keeps_schedule(late, parse_slo(""))


@pytest.mark.parametrize(
    ("arrivals", "expected"), [("poisson:60", "poisson:60"), ("poisson:0.01", "constant:1"), ("closed:3", "closed:3")]
)
def test_a_rare_schedule_is_calibrated_by_a_busier_one(arrivals: str, expected: str) -> None:
    source = null_source(make_request("http://x", arrivals=arrivals, num_requests=10).source())
    assert source.arrivals == expected
    assert (source.warmup_s, source.num_requests) == (0.0, None)


def test_a_trace_that_begins_with_silence_is_calibrated_by_its_mean_rate(tmp_path: Path) -> None:
    rows = [{"timestamp": t, "input_length": 20, "output_length": 4} for t in (0, *range(20_000, 22_000, 100))]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    source = make_request("http://x", arrivals=f"trace:{trace}", num_requests=None, duration_s=60.0, warmup_s=0.0)
    assert null_source(source.source()).arrivals == "constant:1"


def test_a_run_that_is_stopped_keeps_what_came_and_says_so(null_url: str, tmp_path: Path) -> None:
    def stop_after_some(numbers: LiveNumbers, stop: asyncio.Event) -> None:
        if numbers.num_ended > 10:
            stop.set()

    request = make_request(null_url, num_requests=None, duration_s=3600.0)
    measured = run(request, tmp_path / "rows.jsonl", show=stop_after_some)
    assert measured.was_interrupted
    assert measured.info is not None
    assert measured.info.notes[0].startswith("interrupted")
    info, table = read_rows(tmp_path / "rows.jsonl")
    assert len(table) > 10
    assert info.window_end_ns - info.window_start_ns < 3600 * 10**9
    assert set(build_report(info, table).outcomes) <= {"ok"}, "what the stop cut off is no failure of the service"


def test_a_run_that_is_stopped_before_it_began_leaves_nothing(null_url: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    measured = run(make_request(null_url), path, show=lambda _, stop: stop.set())
    assert (measured.info, measured.was_interrupted) == (None, True)
    assert not path.exists()


def test_a_run_that_is_stopped_in_its_warm_up_leaves_nothing(null_url: str, tmp_path: Path) -> None:
    def stop_when_sending(numbers: LiveNumbers, stop: asyncio.Event) -> None:
        if numbers.start_ns is not None:
            stop.set()

    path = tmp_path / "rows.jsonl"
    measured = run(make_request(null_url, warmup_s=60.0), path, show=stop_when_sending)
    assert (measured.info, measured.was_interrupted) == (None, True)
    assert not path.exists()


def test_a_wrong_model_is_told_before_anything_is_sent(null_url: str, tmp_path: Path) -> None:
    with pytest.raises(ClientFailed, match="it serves: null"):
        run(make_request(null_url, model="other"), tmp_path / "rows.jsonl")


def test_a_closed_loop_has_no_gaps_to_hold_it_against() -> None:
    assert scheduled_gaps_ns(draw_plan(make_request("http://x", arrivals="closed:3").source())) == []


def test_repeats_differ_in_text_and_draw_and_in_nothing_else() -> None:
    first, second = (repeat(make_request("http://x"), number) for number in (0, 1))
    assert (first.run_id, first.seed) == ("run-1", 5)
    assert (second.run_id, second.seed) == ("run-2", 6)
    assert msgspec.structs.replace(second, run_id="run-1", seed=5) == first


# Warm-up


def test_warm_up_covers_the_longest_and_the_median_prompt_with_short_answers() -> None:
    plan = draw_plan(make_request("http://x").source())
    lengths = sorted(plan.session(index).turns[0].num_prompt_tokens for index in range(256))
    chosen = shapes(plan)
    assert [session.turns[0].num_prompt_tokens for session in chosen] == [lengths[-1], lengths[128]]
    assert all(session.turns[0].num_output_tokens == OUTPUT_TOKENS for session in chosen)


def test_warm_up_is_in_no_row(null_url: str, tmp_path: Path) -> None:
    run(make_request(null_url), tmp_path / "rows.jsonl")
    assert not any("warm-up" in record.request_id for record in read_records(tmp_path / "rows.jsonl"))


# Rows of several senders


def test_an_unfinished_line_and_an_empty_file_are_left_out(tmp_path: Path) -> None:
    first, second, empty = (str(tmp_path / name) for name in ("a", "b", "c"))
    Path(first).write_bytes(b'{"scheduled_ns":3}\n{"scheduled_ns":9}\n')
    Path(second).write_bytes(b'{"scheduled_ns":5}\n{"schedu')
    Path(empty).write_bytes(b"")
    assert [json.loads(line)["scheduled_ns"] for line in merged_lines([first, second, empty])] == [3, 5, 9]


def test_a_missing_file_of_rows_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="rows of a sender"):
        list(merged_lines([str(tmp_path / "none")]))


# The second count


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PinnedTokenizer:
    return open_tokenizer(str(write_text_model(tmp_path_factory.mktemp("model"))))


def record(number: int, num_chunks: int, count: TokenCount) -> RequestRecord:
    return RequestRecord(
        request_id=f"r{number}",
        outcome=Outcome.OK,
        scheduled_ns=number,
        ended_ns=number + 100,
        chunk_gaps_ns=[10] * num_chunks,
        token_count=count,
    )


def test_texts_are_counted_whole_and_by_chunk_where_the_server_did_not_say(
    tokenizer: PinnedTokenizer, tmp_path: Path
) -> None:
    path = str(tmp_path / "rows")
    text = "The queue that grows"
    records = [record(0, 2, TokenCount.SERVER), record(1, 0, TokenCount.UNKNOWN), record(2, 2, TokenCount.LENGTH)]
    texts = [AnswerText(request_id=f"r{n}", text=text, chunk_ends=[9, len(text)]) for n in (0, 2)]
    Path(path).write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in records))
    Path(texts_path(path)).write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in texts))
    recount(path, tokenizer)
    counted = msgspec.json.Decoder(RequestRecord).decode_lines(Path(path).read_bytes())
    (num,) = tokenizer.counts([text])
    assert num > 2
    assert [each.num_output_tokens_client for each in counted] == [num, None, num]
    assert counted[0].token_count is TokenCount.SERVER
    assert counted[2].token_count is TokenCount.TOKENIZER
    assert sum(counted[2].chunk_tokens or []) == num
    assert not Path(texts_path(path)).exists()


def test_token_ends_are_places_in_the_text(tokenizer: PinnedTokenizer) -> None:
    text = "tail ü and stream"
    (ends,) = tokenizer.token_ends([text])
    assert ends == sorted(ends)
    assert ends[-1] == len(text)


def test_what_looks_like_a_special_token_is_text(tokenizer: PinnedTokenizer) -> None:
    assert tokenizer.counts(["<|im_end|>"]) > [1]


def test_a_run_is_counted_again_with_a_pinned_tokenizer(
    null_url: str, tokenizer: PinnedTokenizer, tmp_path: Path
) -> None:
    (tmp_path / "tokens").mkdir()
    folder = write_text_model(tmp_path / "tokens")
    path = tmp_path / "rows.jsonl"
    measured = run(make_request(null_url, keeps_text=True), path, recounting=recount_with(str(folder)))
    assert measured.info is not None
    assert any(tokenizer.sha256 in note for note in measured.info.notes)
    counts = {r.num_output_tokens_client for r in read_records(path) if r.outcome is Outcome.OK}
    assert counts == set(tokenizer.counts(["word " * 12]))


def test_an_endpoint_that_cannot_count_is_a_note(null_url: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    measured = run(make_request(null_url, keeps_text=True), path, recounting=recount_with("endpoint"))
    assert measured.info is not None
    assert any("were not counted again" in note for note in measured.info.notes)


@pytest.mark.parametrize("content", ["{}", "not json"])
def test_a_broken_tokenizer_is_told_at_once(content: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot be read"):
        open_tokenizer(str(path))


# The host


def test_facts_of_the_host_name_no_owner() -> None:
    facts = machine_facts()
    assert {"cpu", "num_cpus", "kernel", "python", "tailrace"} <= set(facts)
    assert json.loads(msgspec.json.encode(facts)) == facts
