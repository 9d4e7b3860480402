"""The engine's own queue: sequences that are not running, best rank first. Bounded by the scheduler."""

from bisect import insort
from collections.abc import Iterator
from operator import attrgetter

from tailrace.engine.sequence import Sequence, SequenceState

LOOK_AHEAD = 32
"""Candidates that may be found not to fit in one step before admission gives up: bounds planning time on a full
pool."""

_by_rank = attrgetter("rank")


class WaitingQueue:
    """Ordered by (class, arrival, id), with skip-ahead whose unfairness is bounded.

    A sequence that does not fit yet may be overtaken `overtakes_max` times by ones that do; after that it bars the way
    until enough is freed for it. So a large request neither blocks small ones that fit, nor starves.
    """

    def __init__(self, overtakes_max: int) -> None:
        self._overtakes_max = overtakes_max
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def add(self, sequence: Sequence) -> None:
        insort(self._sequences, sequence, key=_by_rank)

    def remove(self, sequence: Sequence) -> None:
        self._sequences.remove(sequence)

    def candidates(self) -> Iterator[Sequence]:
        """In order of rank. The caller removes a candidate from the queue before it asks for the next, or leaves it:
        then it was blocked, and whoever is removed after it has overtaken it."""
        blocked: list[Sequence] = []
        while len(blocked) < min(len(self._sequences), LOOK_AHEAD):
            if any(one.num_overtaken >= self._overtakes_max for one in blocked):
                return
            sequence = self._sequences[len(blocked)]
            yield sequence
            if len(blocked) < len(self._sequences) and self._sequences[len(blocked)] is sequence:
                blocked.append(sequence)

    def count_overtaking(self, admitted: Sequence) -> None:
        """`admitted` is about to run: everybody of better rank who waits was overtaken by it."""
        for sequence in self._sequences[:LOOK_AHEAD]:
            if sequence.rank >= admitted.rank:
                break
            sequence.num_overtaken += 1

    def check_invariants(self) -> None:
        for sequence in self._sequences:
            assert sequence.state is SequenceState.WAITING, "I4: a queued sequence does not wait"
            assert sequence.leader is None, "I4: a follower is in the queue"
            assert not sequence.block_ids, "I2: a waiting sequence holds blocks"
            assert not sequence.followers, "I7: somebody waits for a sequence that does not run"
        assert self._sequences == sorted(self._sequences, key=_by_rank), "the queue is not in order"
