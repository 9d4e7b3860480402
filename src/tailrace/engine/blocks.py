"""KV blocks: who holds which. A block is in exactly one place::

    free     nobody refers to it, its content is worthless
    cached   nobody refers to it, but its key is known: a later prompt may revive it, an allocation may evict it
    held     referred to by one sequence or more (findable by its key too, once it is full and published)

Check, then act: a call that answers "no" has changed nothing. Never knows a sequence or a token.
"""

from collections.abc import Iterable


class BlockPool:
    """`num_blocks` blocks with reference counts. Evicts the least recently used cached block, leaves first.

    Leaves first holds by order of release: a sequence gives its blocks back last to first, and whoever holds a block
    holds its whole prefix, so a prefix always enters the list of cached blocks after what was built on it.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 1, "a pool has blocks"
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: dict[int, None] = {}  # in order of release: the first is evicted first
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._parent_of: dict[int, bytes] = {}
        self.evictions_total = 0

    @property
    def num_available(self) -> int:
        """Blocks an allocation can have: free ones and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_held(self) -> int:
        return self.num_blocks - len(self._free) - len(self._cached)

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Blocks with one reference each, content undefined; None when there are not enough."""
        if num_blocks > len(self._free) + len(self._cached):
            return None
        taken = []
        for _ in range(num_blocks):
            block = self._free.pop() if self._free else self._evict()
            self._references[block] = 1
            taken.append(block)
        return taken

    def _evict(self) -> int:
        block = next(iter(self._cached))
        del self._cached[block]
        del self._block_of[self._key_of.pop(block)]
        del self._parent_of[block]
        self.evictions_total += 1
        return block

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """Blocks of the longest known prefix of a chain of keys. Takes no reference."""
        found = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def count_unreferenced(self, blocks: Iterable[int]) -> int:
        """How many of them are cached only: taking a reference to one uses up an available block."""
        return sum(block in self._cached for block in blocks)

    def acquire(self, blocks: Iterable[int]) -> None:
        """One more reference to each; they are held or cached, never free."""
        for block in blocks:
            if self._references[block] == 0:
                del self._cached[block]  # KeyError: I2, a free block was acquired
            self._references[block] += 1

    def release(self, blocks: list[int]) -> None:
        """Gives back one reference to each, last to first."""
        for block in reversed(blocks):
            left = self._references[block] - 1
            assert left >= 0, f"I2: block {block} released more often than taken"
            self._references[block] = left
            if left == 0:
                if block in self._key_of:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def publish(self, block: int, key: bytes, parent: bytes) -> int:
        """Makes a full block findable. Returns the block that the caller holds from now on.

        When another block already answers to the key, the caller gets a reference to that one and its own is given
        back: equal content is kept once, and a held block's prefix stays held (see the class).
        """
        known = self._block_of.get(key)
        if known is None:
            self._block_of[key] = block
            self._key_of[block] = key
            self._parent_of[block] = parent
            return block
        if known != block:
            self.acquire((known,))
            self.release([block])
        return known

    def check_invariants(self, holders: Iterable[int]) -> None:
        """I2. `holders` lists every reference that the caller knows of, one entry each."""
        expected = [0] * self.num_blocks
        for block in holders:
            expected[block] += 1
        assert expected == self._references, "I2: reference counts differ from the references held"
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "I2: a block is twice in the free list"
        assert not free & cached, "I2: a block is free and cached"
        held = {block for block, count in enumerate(self._references) if count > 0}
        assert not held & (free | cached), "I2: a referenced block is free or cached"
        assert len(free) + len(cached) + len(held) == self.num_blocks, "I2: free + held + cached != total"
        assert {block: key for key, block in self._block_of.items()} == self._key_of, "I2: keys and blocks differ"
        assert cached <= self._key_of.keys(), "I2: a cached block cannot be found"
        assert not free & self._key_of.keys(), "I2: a free block can be found"
        self._check_leaves_first(held)

    def _check_leaves_first(self, held: set[int]) -> None:
        place = {block: index for index, block in enumerate(self._cached)}
        for block, parent in self._parent_of.items():
            above = self._block_of.get(parent)
            if above is None:
                assert parent not in self._key_of.values(), "I2: a block outlives its prefix"
            elif block in held:
                assert above in held, "I2: a held block's prefix may be evicted"
            elif above not in held:
                assert place[above] > place[block], "I2: a prefix would be evicted before what is built on it"
