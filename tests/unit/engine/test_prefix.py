from tailrace.engine.prefix import PrefixesInProgress, block_key, extend_keys, parent_key, root_key
from tailrace.engine.sequence import Sequence
from tailrace.request import RequestId, SamplingParams, SequenceId


def sequence(tokens: list[int], *, salt: str = "", number: int = 0) -> Sequence:
    return Sequence(
        sequence_id=SequenceId(number),
        request_id=RequestId(str(number)),
        choice=0,
        prompt_token_ids=tokens,
        params=SamplingParams(max_tokens=1),
        priority=0,
        arrival_ns=number,
        cache_salt=salt,
    )


def keys(tokens: list[int], salt: str = "") -> list[bytes]:
    return extend_keys(sequence(tokens, salt=salt), len(tokens) // 4, 4)


def test_equal_blocks_after_different_prefixes_have_different_keys() -> None:
    assert keys([1, 2, 3, 4, 5, 6, 7, 8])[1] != keys([9, 2, 3, 4, 5, 6, 7, 8])[1]


def test_equal_tokens_have_equal_keys_under_equal_salt_only() -> None:
    assert keys([1, 2, 3, 4]) == keys([1, 2, 3, 4])
    assert keys([1, 2, 3, 4], "tenant a") != keys([1, 2, 3, 4], "tenant b")


def test_a_salt_cannot_be_mistaken_for_a_block() -> None:
    parent = root_key("")
    assert root_key((parent + b"\x01" + b"\0" * 7).decode("latin-1")) != block_key(parent, [1])


def test_keys_are_extended_not_recomputed() -> None:
    one = sequence(list(range(12)))
    first = extend_keys(one, 1, 4)[0]
    assert extend_keys(one, 3, 4)[0] is first
    assert parent_key(one, 1) == first
    assert parent_key(one, 0) == root_key("")


def test_a_follower_finds_who_computes_its_next_block_and_how_much_they_share() -> None:
    leader, follower = sequence(list(range(16))), sequence([*range(12), 99, 98, 97, 96, 95], number=1)
    extend_keys(leader, 4, 4)
    extend_keys(follower, 4, 4)
    table = PrefixesInProgress()
    table.add(leader, 0)
    assert table.find_leader(follower, 0, 4) == (leader, 3)
    table.discard(leader, 0, 2)
    assert table.find_leader(follower, 0, 4) is None, "block 0 is computed: it is in the pool now"
    assert table.find_leader(follower, 2, 4) == (leader, 3)
    assert table.find_leader(follower, 2, 2) is None
    table.discard(leader, 2, 4)
    assert len(table) == 0


def test_the_first_to_compute_a_key_leads() -> None:
    first, second = sequence(list(range(8))), sequence(list(range(8)), number=1)
    table = PrefixesInProgress()
    for one in (first, second):
        extend_keys(one, 2, 4)
        table.add(one, 0)
    table.discard(second, 0, 2)
    found = table.find_leader(second, 0, 2)
    assert found is not None
    assert found[0] is first
