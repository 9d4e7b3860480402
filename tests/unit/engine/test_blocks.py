import pytest

from tailrace.engine.blocks import BlockPool

A, B, C, ROOT = b"a", b"b", b"c", b"root"


def fill(pool: BlockPool, *chain: bytes) -> list[int]:
    """Allocates and publishes one block a key; the keys are a chain."""
    blocks = pool.allocate(len(chain))
    assert blocks is not None
    parents = (ROOT, *chain)
    for index, key in enumerate(chain):
        assert pool.publish(blocks[index], key, parents[index]) == blocks[index]
    return blocks


def test_an_allocation_that_does_not_fit_changes_nothing() -> None:
    pool = BlockPool(3)
    held = pool.allocate(2)
    assert held is not None
    assert pool.allocate(2) is None
    assert (pool.num_held, pool.num_available) == (2, 1)
    pool.check_invariants(held)


def test_a_shared_block_is_free_only_after_its_last_release() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.acquire(blocks)
    pool.release(blocks)
    assert pool.num_held == 1
    pool.release(blocks)
    assert pool.num_held == 0
    with pytest.raises(AssertionError, match="I2"):
        pool.release(blocks)


def test_a_published_block_stays_findable_after_release_until_it_is_evicted() -> None:
    pool = BlockPool(2)
    blocks = fill(pool, A, B)
    pool.release(blocks)
    assert pool.find([A, B, C]) == blocks
    assert (pool.num_cached, pool.num_available) == (2, 2)
    pool.allocate(1)
    assert pool.find([A, B]) == blocks[:1], "the leaf went first"
    assert pool.evictions_total == 1


def test_the_least_recently_used_chain_is_evicted_first() -> None:
    pool = BlockPool(2)
    first, second = fill(pool, A), fill(pool, B)
    pool.release(first)
    pool.release(second)
    pool.acquire(first)
    pool.release(first)
    pool.allocate(1)
    assert pool.find([A]) == first
    assert pool.find([B]) == []


def test_a_revived_block_is_held_and_not_evicted() -> None:
    pool = BlockPool(2)
    blocks = fill(pool, A)
    pool.release(blocks)
    assert pool.count_unreferenced(blocks) == 1
    pool.acquire(blocks)
    assert pool.count_unreferenced(blocks) == 0
    assert pool.allocate(2) is None
    assert pool.find([A]) == blocks


def test_equal_content_is_kept_once() -> None:
    pool = BlockPool(4)
    first = fill(pool, A)
    twin = pool.allocate(1)
    assert twin is not None
    held = pool.publish(twin[0], A, ROOT)
    assert held == first[0]
    assert pool.num_held == 1
    pool.check_invariants([first[0], held])


def test_a_free_block_cannot_be_acquired() -> None:
    pool = BlockPool(2)
    with pytest.raises(KeyError):
        pool.acquire([0])


def test_check_invariants_notices_a_reference_nobody_holds() -> None:
    pool = BlockPool(2)
    pool.allocate(1)
    with pytest.raises(AssertionError, match="I2"):
        pool.check_invariants([])
