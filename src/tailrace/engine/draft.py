"""The step being planned: its slices, the sequences they belong to, and the budget they are taken from."""

from collections.abc import Callable, Iterable

from tailrace.engine.budget import StepBudget
from tailrace.engine.progress import chunk_slice
from tailrace.engine.sequence import Sequence
from tailrace.engine.step import SamplingRow, Slice


class StepDraft:
    """`slices[i]` belongs to `sequences[i]`."""

    __slots__ = ("budget", "sequences", "slices")

    def __init__(self, budget: StepBudget) -> None:
        self.budget = budget
        self.slices: list[Slice] = []
        self.sequences: list[Sequence] = []

    def add_rows(self, sequences: Iterable[Sequence], tokens_per_block: int, grow: Callable[[Sequence], bool]) -> int:
        """One token for each sequence that has one left to compute. Returns how many have more.

        `grow` gives a sequence its next block or says no. The hot loop of the scheduler: the slice is built in place,
        and what a decode row needs to know was put into the sequence before.
        """
        slices, planned = self.slices, self.sequences
        num_longer = kv_read = 0
        num_before = len(slices)
        for sequence in sequences:
            token_ids = sequence.token_ids
            length = len(token_ids)
            if length - sequence.num_computed != 1:
                num_longer += 1
                continue
            block_ids = sequence.block_ids
            if len(block_ids) * tokens_per_block < length and not grow(sequence):
                continue
            kv_read += length
            planned.append(sequence)
            slices.append(
                Slice(
                    sequence_id=sequence.sequence_id,
                    start=length - 1,
                    token_ids=token_ids[-1:],
                    block_ids=block_ids,
                    sampling=SamplingRow(
                        params=sequence.params,
                        choice=sequence.choice,
                        position=length,
                        masked_ids=sequence.masked_ids if length < sequence.masked_length else (),
                        history=token_ids if sequence.needs_history else None,
                        num_prompt_tokens=sequence.num_prompt_tokens,
                    ),
                )
            )
        self.budget.add_rows(len(slices) - num_before, kv_read)
        return num_longer

    def add_chunks(self, sequences: Iterable[Sequence]) -> None:
        """The next tokens of running sequences that have more than one left to compute."""
        for sequence in sequences:
            if len(sequence.token_ids) - sequence.num_computed > 1:
                self.add_chunk(sequence)

    def add_chunk(self, sequence: Sequence) -> None:
        """As many of its tokens as the budget has left, perhaps none."""
        start = sequence.num_computed
        needed = len(sequence.token_ids) - start
        num_tokens = self.budget.fit_chunk(start, needed)
        if num_tokens > 0:
            self.budget.add_chunk(start, num_tokens, num_tokens == needed)
            self.sequences.append(sequence)
            self.slices.append(chunk_slice(sequence, num_tokens))
