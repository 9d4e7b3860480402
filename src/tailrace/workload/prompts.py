"""Segments to text: words chosen by a hash of the segment's key, one byte a word.

The first eight words carry 64 bits of the key, so two segments share no start unless they share their key: that is the
salt which keeps a prefix cache from finding what the workload did not declare.
"""

import functools
import hashlib
from collections.abc import Iterable

from tailrace.workload.job import Realisation
from tailrace.workload.plan import Segment

SALT_WORDS = 8
"""A segment cut shorter than this no longer begins uniquely."""


def segment_text(key: str, num_tokens: int, realisation: Realisation) -> str:
    """Words of about `num_tokens` tokens (at least one word), joined by single spaces. Of two lengths of one key, the
    shorter text begins the longer: the hash function's output of any length begins its longer ones (FIPS 202)."""
    table = _table(realisation.words)
    num_words = max(1, round(num_tokens / realisation.tokens_per_word))
    return " ".join([table[byte] for byte in hashlib.shake_128(key.encode()).digest(num_words)])


def prompt_text(segments: Iterable[Segment], realisation: Realisation) -> str:
    """Texts of the segments, one space between them."""
    return " ".join([segment_text(segment.key, segment.num_tokens, realisation) for segment in segments])


def without_overhead(segments: tuple[Segment, ...], overhead_tokens: int) -> tuple[Segment, ...]:
    """Segments shortened by what the model's template adds, from the last one backwards.

    The last is the unshared one, so a shared start keeps its length; none is cut below its salt.
    """
    cut = list(segments)
    left = overhead_tokens
    for position in range(len(cut) - 1, -1, -1):
        if left <= 0:
            break
        segment = cut[position]
        kept = max(min(segment.num_tokens, SALT_WORDS), segment.num_tokens - left)
        left -= segment.num_tokens - kept
        cut[position] = Segment(segment.key, kept)
    return tuple(cut)


@functools.lru_cache(maxsize=8)
def _table(words: tuple[str, ...]) -> tuple[str, ...]:
    """256 entries, one a byte; a shorter list is repeated, which makes its first words up to twice as likely."""
    assert 0 < len(words) <= 256, "one byte chooses one word"
    return (words * -(-256 // len(words)))[:256]
