"""Prefix keys, and which running sequence is computing which of them.

A full block is named by a hash chain: `key[i] = H(key[i-1], token ids of block i)`, and `key[-1]` is H(salt). Equal
keys mean equal tokens from the start of the prompt and equal salt, so a tenant finds only what its own salt computed.
The hash is cryptographic (BLAKE2b, 128 bits) because prompts come from outside: a collision would serve one caller's
KV to another.
"""

from array import array
from hashlib import blake2b

from tailrace.engine.sequence import Sequence

KEY_BYTES = 16


def root_key(salt: str) -> bytes:
    """Parent of every first block of that salt."""
    return blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=KEY_BYTES, person=b"tailrace-salt").digest()


def block_key(parent: bytes, token_ids: list[int]) -> bytes:
    return blake2b(parent + array("q", token_ids).tobytes(), digest_size=KEY_BYTES, person=b"tailrace-block").digest()


def extend_keys(sequence: Sequence, num_blocks: int, tokens_per_block: int) -> list[bytes]:
    """The sequence's chain, computed at least as far as its first `num_blocks` full blocks."""
    keys = sequence.block_keys
    for index in range(len(keys), num_blocks):
        tokens = sequence.token_ids[index * tokens_per_block : (index + 1) * tokens_per_block]
        assert len(tokens) == tokens_per_block, "only full blocks have keys"
        keys.append(block_key(keys[-1] if keys else root_key(sequence.cache_salt), tokens))
    return keys


def parent_key(sequence: Sequence, index: int) -> bytes:
    return sequence.block_keys[index - 1] if index else root_key(sequence.cache_salt)


class PrefixesInProgress:
    """Key -> the running sequence that is computing that block now."""

    def __init__(self) -> None:
        self._leader_of: dict[bytes, Sequence] = {}

    def add(self, sequence: Sequence, first: int) -> None:
        """The sequence was admitted and computes its blocks from `first` on. The first to compute a key leads."""
        for key in sequence.block_keys[first:]:
            self._leader_of.setdefault(key, sequence)

    def discard(self, sequence: Sequence, first: int, end: int) -> None:
        """Blocks `first` to `end` are computed, or never will be by it."""
        for key in sequence.block_keys[first:end]:
            if self._leader_of.get(key) is sequence:
                del self._leader_of[key]

    def find_leader(self, follower: Sequence, num_found: int, num_wanted: int) -> tuple[Sequence, int] | None:
        """Who computes the follower's next block, and how many leading blocks the two share."""
        if num_found >= num_wanted:
            return None
        keys = follower.block_keys
        leader = self._leader_of.get(keys[num_found])
        if leader is None:
            return None
        num_shared = num_found + 1
        limit = min(num_wanted, len(leader.block_keys))
        while num_shared < limit and leader.block_keys[num_shared] == keys[num_shared]:
            num_shared += 1
        return leader, num_shared

    def __len__(self) -> int:
        return len(self._leader_of)
