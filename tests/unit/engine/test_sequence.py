import pytest

from tailrace.engine.sequence import Sequence, SequenceState
from tailrace.request import RequestId, SamplingParams, SequenceId


def sequence(**params: object) -> Sequence:
    return Sequence(
        sequence_id=SequenceId(1),
        request_id=RequestId("r"),
        choice=0,
        prompt_token_ids=(4, 5, 6),
        params=SamplingParams(**({"max_tokens": 10} | params)),  # type: ignore[arg-type]
        priority=2,
        arrival_ns=7,
    )


@pytest.mark.parametrize("end", [SequenceState.FINISHED, SequenceState.CANCELLED, SequenceState.FAILED])
def test_terminal_is_terminal(end: SequenceState) -> None:
    one = sequence()
    one.move_to(SequenceState.RUNNING)
    one.move_to(end)
    assert one.has_ended
    for state in SequenceState:
        with pytest.raises(AssertionError, match="I4"):
            one.move_to(state)


def test_a_waiting_sequence_does_not_start_to_wait_again() -> None:
    with pytest.raises(AssertionError, match="I4"):
        sequence().move_to(SequenceState.WAITING)


def test_a_preempted_sequence_waits_again() -> None:
    one = sequence()
    one.move_to(SequenceState.RUNNING)
    one.move_to(SequenceState.WAITING)
    assert not one.has_ended


def test_bind_takes_the_end_tokens_of_model_and_request() -> None:
    one = sequence(stop_token_ids=(9,), min_tokens=2)
    one.bind(frozenset({0}), 100)
    assert one.stop_ids == {0, 9}
    assert one.masked_ids == (0, 9)
    assert one.masked_length == 5


def test_ignore_eos_leaves_the_requests_own_stop_tokens() -> None:
    one = sequence(stop_token_ids=(9,), ignore_eos=True)
    one.bind(frozenset({0}), 100)
    assert one.stop_ids == {9}
    assert one.masked_ids == ()


def test_the_context_cuts_the_length() -> None:
    one = sequence()
    one.bind(frozenset(), 8)
    assert one.tokens_max == 8


def test_output_is_what_follows_the_prompt() -> None:
    one = sequence()
    one.token_ids += [1, 2]
    assert one.output_token_ids == [1, 2]
    assert one.num_output_tokens == 2
    assert one.rank == (2, 7, 1)
