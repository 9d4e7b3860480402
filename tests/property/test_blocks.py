"""The block pool against a model of itself that is a handful of sets: random users who take, share, publish and
return."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tailrace.engine.blocks import BlockPool

NUM_BLOCKS = 8


class PoolMachine(RuleBasedStateMachine):
    """A user holds a chain of blocks, the first `num_published` of which are findable under its keys."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.users: list[tuple[list[int], list[bytes]]] = []
        self.content: dict[int, bytes] = {}
        """What each block holds, if somebody filled it: its key stands for its tokens and all before them."""

    @rule(story=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def take(self, story: list[int]) -> None:
        """A prompt of one letter a block: finds what is there, fills and publishes the rest; or gets nothing at all."""
        keys = [bytes(story[: index + 1]) for index in range(len(story))]
        hits = self.pool.find(keys)
        for block, key in zip(hits, keys, strict=False):
            assert self.content[block] == key, "a key leads to a block with other content"
        needed = len(keys) - len(hits)
        before = self.pool.num_available
        if needed + self.pool.count_unreferenced(hits) > before:
            return
        self.pool.acquire(hits)
        fresh = self.pool.allocate(needed)
        assert fresh is not None, "check, then act: the check said yes"
        held = hits + fresh
        assert len(set(held)) == len(held), "a block was given out twice"
        others = {block for blocks, _ in self.users for block in blocks}
        assert not others & set(fresh), "a block in use was given out"
        for block, key in zip(fresh, keys[len(hits) :], strict=True):
            self.content[block] = key
        self.users.append((held, keys))

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        held, keys = data.draw(st.sampled_from(self.users))
        for index, key in enumerate(keys):
            held[index] = self.pool.publish(held[index], key, keys[index - 1] if index else b"root")
            assert self.content[held[index]] == key, "publishing exchanged a block for other content"

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.users) - 1))
        held, _ = self.users.pop(index)
        self.pool.release(held)

    @rule(count=st.integers(NUM_BLOCKS + 1, NUM_BLOCKS + 3))
    def ask_too_much(self, count: int) -> None:
        before = (self.pool.num_held, self.pool.num_cached, self.pool.num_available)
        assert self.pool.allocate(count) is None
        assert (self.pool.num_held, self.pool.num_cached, self.pool.num_available) == before

    @invariant()
    def blocks_are_conserved_and_content_is_kept(self) -> None:
        self.pool.check_invariants([block for held, _ in self.users for block in held])
        for held, keys in self.users:
            assert [self.content[block] for block in held] == keys, "a held block was overwritten"


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=max(50, settings.default.max_examples // 5), stateful_step_count=40)
"""A fifth of the profile's examples: each is forty steps, and the schedules of test_scheduler.py exercise the pool
too."""
