from tailrace.engine.sequence import Sequence
from tailrace.engine.waiting import LOOK_AHEAD, WaitingQueue
from tailrace.request import RequestId, SamplingParams, SequenceId


def sequence(number: int, priority: int = 0) -> Sequence:
    return Sequence(
        sequence_id=SequenceId(number),
        request_id=RequestId(str(number)),
        choice=0,
        prompt_token_ids=[1],
        params=SamplingParams(max_tokens=1),
        priority=priority,
        arrival_ns=number,
    )


def queue(count: int, overtakes_max: int = 2) -> WaitingQueue:
    waiting = WaitingQueue(overtakes_max)
    for number in reversed(range(count)):
        waiting.add(sequence(number))
    return waiting


def admit(waiting: WaitingQueue, fits: set[int]) -> list[int]:
    admitted = []
    for one in waiting.candidates():
        if one.sequence_id in fits:
            waiting.remove(one)
            waiting.count_overtaking(one)
            admitted.append(int(one.sequence_id))
    return admitted


def test_order_is_class_then_arrival() -> None:
    waiting = queue(2)
    waiting.add(sequence(9, priority=-1))
    assert [one.sequence_id for one in waiting] == [9, 0, 1]


def test_candidates_removed_on_the_way_are_not_skipped_over() -> None:
    assert admit(queue(4), {0, 1, 2, 3}) == [0, 1, 2, 3]


def test_one_that_does_not_fit_is_passed_a_bounded_number_of_times() -> None:
    waiting = queue(6)
    assert admit(waiting, {1, 2, 3, 4, 5}) == [1, 2]
    assert admit(waiting, {3, 4, 5}) == []
    assert admit(waiting, {0, 3, 4, 5}) == [0, 3, 4, 5]


def test_a_worse_class_is_not_overtaken_by_a_better_one() -> None:
    waiting = queue(1)
    waiting.add(sequence(5, priority=-1))
    assert admit(waiting, {5}) == [5]
    assert [one.num_overtaken for one in waiting] == [0]


def test_the_look_ahead_past_blocked_ones_is_bounded() -> None:
    waiting = queue(LOOK_AHEAD + 5, overtakes_max=1000)
    seen = [one.sequence_id for one in waiting.candidates()]
    assert seen == list(range(LOOK_AHEAD))
