"""A step as one or several forward passes, so that prompt log-probabilities of a long chunk do not ask for gigabytes of
logits at once (1,024 rows of a vocabulary of 152k are 0.6 GB). Pure. Without them a step is one pass.
"""

from collections.abc import Sequence
from typing import NamedTuple

from tailrace.engine.step import SamplingRow, Slice
from tailrace.model.paged import Piece


class Part(NamedTuple):
    """A slice, or a run of its tokens."""

    slice_index: int
    """In its plan."""
    piece: Piece
    sampling: SamplingRow | None
    targets: Sequence[int]
    num_top: int


def split_passes(slices: Sequence[Slice], rows_max: int) -> list[list[Part]]:
    """Parts in passes of at most `rows_max` rows of logits, in an order that computes each slice from its start."""
    if all(piece.num_prompt_logprobs is None for piece in slices):
        return [[_whole(index, piece) for index, piece in enumerate(slices)]]
    passes: list[list[Part]] = [[]]
    room = rows_max
    for index, piece in enumerate(slices):
        first = 0
        while first < len(piece.token_ids):
            if room == 0:
                passes.append([])
                room = rows_max
            num_tokens = len(piece.token_ids) - first
            if piece.num_prompt_logprobs is not None:
                num_tokens = min(num_tokens, room)
            part = _part(index, piece, first, num_tokens)
            passes[-1].append(part)
            # A row that is drawn from has no target in the prompt, so a part never has more rows than tokens.
            room -= len(part.targets) + (part.sampling is not None)
            first += num_tokens
    return passes


def rows_wanted(parts: Sequence[Part]) -> list[int]:
    """Indices into the pass's concatenated tokens: rows to draw from first, then rows with targets, both in order."""
    drawn: list[int] = []
    scored: list[int] = []
    begin = 0
    for part in parts:
        end = begin + len(part.piece.token_ids)
        if part.sampling is not None:
            drawn.append(end - 1)
        scored.extend(range(begin, begin + len(part.targets)))
        begin = end
    return drawn + scored


def _whole(index: int, piece: Slice) -> Part:
    return Part(index, Piece(piece.token_ids, piece.start, piece.block_ids), piece.sampling, (), 0)


def _part(index: int, piece: Slice, first: int, num_tokens: int) -> Part:
    end = first + num_tokens
    return Part(
        slice_index=index,
        piece=Piece(piece.token_ids[first:end], piece.start + first, piece.block_ids),
        sampling=piece.sampling if end == len(piece.token_ids) else None,
        targets=piece.prompt_targets[first:end],
        num_top=piece.num_prompt_logprobs or 0,
    )
