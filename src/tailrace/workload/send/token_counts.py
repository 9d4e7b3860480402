"""How many tokens each chunk carried, by the best of what is known (`measure.record.TokenCount`). Pure."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import msgspec

from tailrace.measure.record import RequestRecord, TokenCount


class ChunkCounts(msgspec.Struct, frozen=True, kw_only=True):
    tokens: list[int] | None
    """One entry a chunk; None: one token each. An entry of 0: the chunk completed no token."""
    source: TokenCount


def count_chunks(
    lengths: Sequence[int], running_totals: Sequence[int], total: int | None, finish_reason: str | None
) -> ChunkCounts:
    """Tokens of each chunk that had text.

    `lengths`: characters of each. `running_totals`: the server's count of output tokens as each chunk came; shorter
    than `lengths` where it did not always say. `total`: its final count. Tokens without text belong to the chunk
    before them, so that the sum is the server's total.
    """
    num_chunks = len(lengths)
    if num_chunks == 0:
        return ChunkCounts(tokens=None, source=TokenCount.SERVER)
    if len(running_totals) == num_chunks:
        tokens = [after - before for before, after in pairwise((0, *running_totals))]
        rest = 0 if total is None else total - running_totals[-1]
        if min(tokens) >= 1 and rest >= 0:
            tokens[-1] += rest
            return ChunkCounts(tokens=_or_ones(tokens), source=TokenCount.SERVER)
    if total is None:
        return ChunkCounts(tokens=None, source=TokenCount.UNKNOWN)
    if total == num_chunks:
        return ChunkCounts(tokens=None, source=TokenCount.SERVER)
    if total == num_chunks + 1 and finish_reason == "stop":
        # The end token is counted and has no text.
        return ChunkCounts(tokens=[1] * (num_chunks - 1) + [2], source=TokenCount.SERVER)
    return ChunkCounts(tokens=share_by_length(lengths, total), source=TokenCount.LENGTH)


def share_by_length(lengths: Sequence[int], total: int) -> list[int]:
    """Shares `total` tokens out by length of text; the sum is `total` and the first chunk has at least one token.

    With at least one token a chunk, every chunk has one and the others are shared; with fewer, some have none.
    """
    if total <= 0:
        return [0] * len(lengths)
    floor = 1 if total >= len(lengths) else 0
    extra = total - floor * len(lengths)
    text = max(sum(lengths), 1)
    # Rounded up, so that the text seen so far is never said to hold fewer tokens than its share.
    ends = [-(-extra * end // text) for end in accumulate(lengths)]
    return [floor + after - before for before, after in pairwise((0, *ends))]


def tokens_per_chunk(char_ends: Sequence[int], token_ends: Sequence[int]) -> list[int]:
    """Tokens that each chunk completed, zeros included.

    `char_ends`: end of each chunk in the joined text, rising. `token_ends`: end of each token of the tokenised joined
    text, rising. A token belongs to the chunk that brings its last character; one beyond the text, to the last chunk.
    """
    counts = [0] * len(char_ends)
    chunk = 0
    for end in token_ends:
        while chunk < len(char_ends) - 1 and char_ends[chunk] < end:
            chunk += 1
        if counts:
            counts[chunk] += 1
    return counts


def merge_empty(gaps_ns: Sequence[int], tokens: Sequence[int]) -> tuple[list[int], list[int]]:
    """Leaves out chunks without a token; their gap goes to the next one that has a token."""
    assert len(gaps_ns) == len(tokens), "one gap a chunk"
    merged_gaps, merged_tokens, pending_ns = [], [], 0
    for gap_ns, count in zip(gaps_ns, tokens, strict=True):
        pending_ns += gap_ns
        if count > 0:
            merged_gaps.append(pending_ns)
            merged_tokens.append(count)
            pending_ns = 0
    return merged_gaps, merged_tokens


def retokenised(record: RequestRecord, char_ends: Sequence[int], token_ends: Sequence[int]) -> RequestRecord:
    """The record with the client's own count, made after the run from the kept text (`job.AnswerText`).

    The tokens of chunks are replaced only where the server did not give them.
    """
    record = msgspec.structs.replace(record, num_output_tokens_client=len(token_ends))
    if record.token_count is TokenCount.SERVER or len(char_ends) != len(record.chunk_gaps_ns):
        return record
    gaps, tokens = merge_empty(record.chunk_gaps_ns, tokens_per_chunk(char_ends, token_ends))
    return msgspec.structs.replace(
        record, chunk_gaps_ns=gaps, chunk_tokens=_or_ones(tokens), token_count=TokenCount.TOKENIZER
    )


def _or_ones(tokens: list[int]) -> list[int] | None:
    return None if all(count == 1 for count in tokens) else tokens
