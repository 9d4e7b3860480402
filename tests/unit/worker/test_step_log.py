from tailrace.worker.channel import StepRecord
from tailrace.worker.step_log import StepLogBuffer


def record(step_id: int) -> StepRecord:
    return StepRecord(
        step_id=step_id,
        started_ns=step_id,
        duration_ns=1,
        plan_ns=0,
        kernel_ns=1,
        sampling_ns=0,
        commit_ns=0,
        num_tokens=1,
        num_prefill_tokens=0,
        num_decode_rows=1,
        num_kv_tokens_read=1,
        num_waiting=0,
        num_running=1,
        num_blocks_held=1,
    )


def test_a_full_step_log_keeps_the_newest_records_oldest_first() -> None:
    log = StepLogBuffer(3)
    for step_id in range(5):
        log.append(record(step_id))
    assert [r.step_id for r in log.records()] == [2, 3, 4]
    assert len(log) == 3


def test_what_was_read_does_not_change_when_steps_go_on() -> None:
    log = StepLogBuffer(2)
    log.append(record(1))
    read = log.records()
    log.append(record(2))
    assert [r.step_id for r in read] == [1]


def test_a_log_of_length_zero_keeps_nothing() -> None:
    log = StepLogBuffer(0)
    log.append(record(1))
    assert log.records() == []
