"""The running sequences and all that they hold: KV blocks, prefixes in progress, copies to be made, followers."""

from collections.abc import Iterable
from operator import attrgetter

from tailrace.engine.admission import Admission, WaitFor
from tailrace.engine.blocks import BlockPool
from tailrace.engine.prefix import PrefixesInProgress, extend_keys, parent_key
from tailrace.engine.sequence import Sequence, SequenceState
from tailrace.engine.totals import Totals
from tailrace.engine.waiting import WaitingQueue

_by_rank = attrgetter("rank")


class Residents:
    """Who leaves gives everything back before the call returns; who waited for it goes back to the queue."""

    def __init__(
        self, pool: BlockPool, waiting: WaitingQueue, totals: Totals, *, tokens_per_block: int, prefix_caching: bool
    ) -> None:
        self.pool = pool
        self.sequences: list[Sequence] = []
        """By rank: the last one is the next victim."""
        self.in_progress = PrefixesInProgress()
        self.num_followers = 0
        self._waiting = waiting
        self._totals = totals
        self._tokens_per_block = tokens_per_block
        self._prefix_caching = prefix_caching
        self._copying: list[Sequence] = []

    def __len__(self) -> int:
        return len(self.sequences)

    # Coming and going

    def start(self, sequence: Sequence, admission: Admission) -> None:
        """From the queue into the batch, with the blocks that `admission` found."""
        self._waiting.remove(sequence)
        self._waiting.count_overtaking(sequence)
        self.pool.acquire(admission.shared)
        own = self.pool.allocate(admission.num_new)
        assert own is not None, "I2: admission counted the blocks"
        sequence.block_ids = admission.shared + own
        sequence.num_computed = admission.start
        sequence.num_blocks_published = len(admission.shared)
        sequence.num_overtaken = 0
        if admission.copy_source is not None:
            self.pool.acquire((admission.copy_source,))
            sequence.pending_copy = (admission.copy_source, own[0])
            self._copying.append(sequence)
        if self._prefix_caching:
            extend_keys(sequence, len(sequence.token_ids) // self._tokens_per_block, self._tokens_per_block)
            self.in_progress.add(sequence, len(admission.shared))
        sequence.move_to(SequenceState.RUNNING)
        self.sequences.append(sequence)
        self.sequences.sort(key=_by_rank)

    def leave(self, sequence: Sequence) -> None:
        """Gives everything back. The caller moves it to its next state."""
        self.sequences.remove(sequence)
        self.in_progress.discard(sequence, sequence.num_blocks_published, len(sequence.block_keys))
        if sequence.pending_copy is not None:
            self._drop_copy(sequence)  # first: its source was built on blocks that are released next
        self.pool.release(sequence.block_ids)
        sequence.block_ids = []
        sequence.num_blocks_published = 0
        self._wake(sequence.followers)

    def grow(self, sequence: Sequence) -> bool:
        """One more block for a decoding sequence, if need be by preemption: the running one of the worst rank first.

        Rows are planned in order of rank, so a victim was never planned before in this step, and the best sequence
        always gets its block (it fits alone): that is why preemption cannot go round in circles. False: it was the
        victim itself.
        """
        while (blocks := self.pool.allocate(1)) is None:
            victim = self.sequences[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.block_ids += blocks
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Takes all its KV; its output stays, and it waits to be computed again."""
        sequence.num_lost = sequence.num_computed
        self.leave(sequence)
        sequence.num_computed = 0
        sequence.move_to(SequenceState.WAITING)
        self._waiting.add(sequence)
        self._totals.preemptions += 1

    # Prefixes

    def publish(self, sequence: Sequence) -> None:
        """Makes the blocks that are full now findable."""
        if not self._prefix_caching:
            return
        first, end = sequence.num_blocks_published, sequence.num_computed // self._tokens_per_block
        keys = extend_keys(sequence, end, self._tokens_per_block)
        for index in range(first, end):
            block = sequence.block_ids[index]
            sequence.block_ids[index] = self.pool.publish(block, keys[index], parent_key(sequence, index))
        self.in_progress.discard(sequence, first, end)
        sequence.num_blocks_published = end

    # Leaders and followers

    def park(self, sequence: Sequence, wait: WaitFor) -> None:
        """Waits for its leader instead of in the queue; the leader inherits the better class of the two."""
        self._waiting.remove(sequence)
        self.num_followers += 1
        sequence.leader, sequence.wait_tokens = wait
        sequence.leader.followers.append(sequence)
        self._rank(sequence.leader)

    def unpark(self, follower: Sequence) -> None:
        """Waits for nobody any more; the caller says where it goes."""
        leader = follower.leader
        assert leader is not None, "I4: a follower has a leader"
        leader.followers.remove(follower)
        follower.leader = None
        self.num_followers -= 1
        self._rank(leader)

    def wake_ready(self, leader: Sequence) -> None:
        """The followers whose wait is over go back to the queue."""
        self._wake([one for one in leader.followers if one.wait_tokens <= leader.num_computed])

    def _wake(self, followers: Iterable[Sequence]) -> None:
        for follower in tuple(followers):
            self.unpark(follower)
            self._waiting.add(follower)

    def _rank(self, leader: Sequence) -> None:
        best = min([leader.priority, *(follower.rank[0] for follower in leader.followers)])
        if leader.rank[0] != best:
            leader.rank = (best, leader.arrival_ns, leader.sequence_id)
            self.sequences.sort(key=_by_rank)

    # Copies of forks

    def copies_of(self, planned: list[Sequence]) -> tuple[tuple[int, int], ...]:
        """Those that the step with these sequences has to make first. They stay due until a step succeeds."""
        if not self._copying:
            return ()
        chosen = set(planned)
        return tuple(one.pending_copy for one in self._copying if one in chosen and one.pending_copy is not None)

    def settle_copies(self, planned: Iterable[Sequence]) -> None:
        """The step with these sequences succeeded: its copies were made."""
        if self._copying:
            for sequence in planned:
                if sequence.pending_copy is not None:
                    self._drop_copy(sequence)

    def _drop_copy(self, sequence: Sequence) -> None:
        assert sequence.pending_copy is not None
        self.pool.release([sequence.pending_copy[0]])
        sequence.pending_copy = None
        self._copying.remove(sequence)

    def check_invariants(self) -> None:
        """I2 and I4 of everybody who runs. O(sequences + blocks)."""
        size = self._tokens_per_block
        for sequence in self.sequences:
            held, length = len(sequence.block_ids), len(sequence.token_ids)
            assert sequence.state is SequenceState.RUNNING, "I4: a sequence in the running list does not run"
            assert sequence.leader is None, "I4: a running sequence waits for another"
            assert sequence.num_computed < length, "I7: a running sequence has nothing to compute"
            assert -(-sequence.num_computed // size) <= held <= -(-length // size), "I2: blocks held"
            for follower in sequence.followers:
                assert follower.leader is sequence, "I4: a follower follows another"
                assert follower.state is SequenceState.WAITING, "I4: a follower does not wait"
        assert self.sequences == sorted(self.sequences, key=_by_rank), "the last one is not the next victim"
        assert self.sequences or not len(self.in_progress), "prefixes are in progress and nothing runs"
        assert sum(len(one.followers) for one in self.sequences) == self.num_followers, "I1: followers"
        holders = [block for one in self.sequences for block in one.block_ids]
        holders += [one.pending_copy[0] for one in self._copying if one.pending_copy is not None]
        self.pool.check_invariants(holders)
