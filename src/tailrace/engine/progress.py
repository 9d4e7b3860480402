"""What a sequence asks of a step, and what the step's result does to it."""

from tailrace.engine.sequence import Sequence
from tailrace.engine.step import SamplingRow, SequenceEvent, Slice, SliceOutcome
from tailrace.request import FinishReason


def sampling_row(sequence: Sequence) -> SamplingRow:
    """The state of the draw that follows the sequence's last token."""
    token_ids = sequence.token_ids
    length = len(token_ids)
    return SamplingRow(
        params=sequence.params,
        choice=sequence.choice,
        position=length,
        masked_ids=sequence.masked_ids if length < sequence.masked_length else (),
        history=token_ids if sequence.needs_history else None,
        num_prompt_tokens=sequence.num_prompt_tokens,
    )


def chunk_slice(sequence: Sequence, num_tokens: int) -> Slice:
    """The next `num_tokens`; the last chunk draws a token. Prompt rows not reported before are asked for."""
    start, end = sequence.num_computed, sequence.num_computed + num_tokens
    reports = sequence.wants_prompt_logprobs and end > sequence.num_prompt_reported
    return Slice(
        sequence_id=sequence.sequence_id,
        start=start,
        token_ids=sequence.token_ids[start:end],
        block_ids=sequence.block_ids,
        sampling=sampling_row(sequence) if end == len(sequence.token_ids) else None,
        num_prompt_logprobs=sequence.params.num_prompt_logprobs if reports else None,
        prompt_targets=sequence.token_ids[start + 1 : min(end + 1, sequence.num_prompt_tokens)] if reports else (),
    )


def advance(sequence: Sequence, piece: Slice, result: SliceOutcome, now_ns: int) -> SequenceEvent | None:
    """Appends the token drawn and says what happened; None when nothing did. The caller ends it on a finish reason."""
    drawn = result.token_ids
    if sequence.first_token_ns is None or not drawn:
        return _advance_prompt(sequence, piece, result, now_ns)
    return SequenceEvent(
        sequence_id=sequence.sequence_id,
        token_ids=drawn,
        logprobs=result.logprobs,
        finish_reason=_append(sequence, drawn),
    )


def _append(sequence: Sequence, drawn: tuple[int, ...]) -> FinishReason | None:
    token_ids = sequence.token_ids
    token_ids += drawn
    if drawn[0] in sequence.stop_ids:
        return FinishReason.STOP
    if len(token_ids) >= sequence.tokens_max:
        return FinishReason.LENGTH
    return None


def _advance_prompt(sequence: Sequence, piece: Slice, result: SliceOutcome, now_ns: int) -> SequenceEvent | None:
    """A chunk of the prompt, or of what a preemption took; perhaps with the first token."""
    assert len(result.token_ids) == (piece.sampling is not None), "one token for a slice that asked for it, else none"
    prompt_logprobs = result.prompt_logprobs
    if prompt_logprobs:
        # After a preemption rows are computed again; what was reported stays reported once.
        num_known = max(0, sequence.num_prompt_reported - piece.start)
        sequence.num_prompt_reported = max(sequence.num_prompt_reported, piece.start + len(prompt_logprobs))
        prompt_logprobs = prompt_logprobs[num_known:]
    if not result.token_ids:
        if not prompt_logprobs:
            return None
        return SequenceEvent(sequence_id=sequence.sequence_id, prompt_logprobs=prompt_logprobs)
    sequence.first_token_ns = now_ns
    return SequenceEvent(
        sequence_id=sequence.sequence_id,
        token_ids=result.token_ids,
        logprobs=result.logprobs,
        prompt_logprobs=prompt_logprobs,
        num_cached_tokens=sequence.num_cached_tokens,
        finish_reason=_append(sequence, result.token_ids),
    )
