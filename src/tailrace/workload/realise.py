"""How prompts of words become prompts of tokens at one endpoint: a few probes that it counts.

In: a function that sends a text and says how many prompt tokens the endpoint counted. Out: a `Realisation`. A count is
taken as overhead + sum of each word's tokens, and the last probe, of drawn words, checks that this is so.
"""

import hashlib
import uuid
from collections.abc import Awaitable, Callable, Sequence

from tailrace.workload.job import Realisation
from tailrace.workload.prompts import segment_text
from tailrace.workload.words import WORDS

CountPromptTokens = Callable[[str], Awaitable[int | None]]

PROBES_MAX = 24
_WORDS_MIN = 128
"""With fewer words left, drop none and use the mean."""
_CHECK_WORDS = 384
_TOLERANCE_RATIO = 0.01


class _NoCount(Exception):
    """The endpoint gave no count, or one that no text can have."""


async def calibrate(count_prompt_tokens: CountPromptTokens, *, salt: str | None = None) -> Realisation:
    """At most 24 probes of at most 512 words. Errors of `count_prompt_tokens` pass through.

    Verified when a prompt of drawn words has the predicted count to 1 % (at least one token). Without counts the
    realisation is one token a word, no overhead, unverified, and its note says so.
    """
    prober = _Prober(count_prompt_tokens, salt or uuid.uuid4().hex)
    try:
        return await _calibrate(prober)
    except _NoCount as error:
        return Realisation(words=WORDS, note=f"prompt lengths are not verified: {error}; one token a word is assumed")


class _Prober:
    """Counts texts, each of which begins differently."""

    def __init__(self, count_prompt_tokens: CountPromptTokens, salt: str) -> None:
        self._count = count_prompt_tokens
        self._salt = salt
        self.num_probes = 0

    async def tokens(self, words: Sequence[str], times: int = 1) -> int:
        """Tokens of the words, each so many times, in an order of this probe's own."""
        order: list[str] = []
        for round_number in range(times):
            order += sorted(words, key=lambda word: self._order(round_number, word))
        return await self._tokens_of(" ".join(order))

    async def drawn(self, realisation: Realisation) -> int:
        """Tokens of a prompt as a run would make it."""
        key = f"{self._salt}/check"
        return await self._tokens_of(segment_text(key, round(_CHECK_WORDS * realisation.tokens_per_word), realisation))

    async def _tokens_of(self, text: str) -> int:
        self.num_probes += 1
        counted = await self._count(text)
        if counted is None:
            raise _NoCount("the endpoint does not count prompt tokens")
        if counted < 1:
            raise _NoCount(f"the endpoint counted {counted} prompt tokens of {text.count(' ') + 1} words")
        return counted

    def _order(self, round_number: int, word: str) -> bytes:
        return hashlib.sha256(f"{self._salt}/{self.num_probes}/{round_number}/{word}".encode()).digest()


async def _calibrate(prober: _Prober) -> Realisation:
    once = await prober.tokens(WORDS)
    twice = await prober.tokens(WORDS, times=2)
    cost = twice - once
    overhead = once - cost
    if cost < len(WORDS) // 4 or overhead < 0:
        raise _NoCount(f"its counts make no sense ({once} tokens of {len(WORDS)} words, {twice} of twice as many)")
    dropped: list[str] = []
    words = WORDS
    if cost != len(WORDS):
        dropped = await _long_words(prober, WORDS, cost, overhead)
        words = tuple(word for word in WORDS if word not in dropped)
        if dropped and len(words) >= _WORDS_MIN:
            cost = await prober.tokens(words) - overhead
        else:
            dropped, words = [], WORDS
    realisation = Realisation(words=words, tokens_per_word=cost / len(words), overhead_tokens=overhead)
    return await _checked(prober, realisation, dropped)


async def _long_words(prober: _Prober, words: Sequence[str], cost: int, overhead: int) -> list[str]:
    """Words of more or less than one token, by halving, while probes last (two are kept)."""
    found: list[str] = []
    parts: list[tuple[Sequence[str], int]] = [(words, cost)]
    while parts:
        part, part_cost = parts.pop(0)
        if part_cost == len(part):
            continue
        if len(part) == 1:
            found.append(part[0])
            continue
        if prober.num_probes >= PROBES_MAX - 2:
            break
        half = len(part) // 2
        left_cost = await prober.tokens(part[:half]) - overhead
        parts += [(part[:half], left_cost), (part[half:], part_cost - left_cost)]
    return found


async def _checked(prober: _Prober, realisation: Realisation, dropped: Sequence[str]) -> Realisation:
    expected = realisation.overhead_tokens + _CHECK_WORDS * realisation.tokens_per_word
    counted = await prober.drawn(realisation)
    notes = [f"words left out of prompts, not one token here: {', '.join(dropped)}"] if dropped else []
    verified = abs(counted - expected) <= max(1.0, _TOLERANCE_RATIO * expected)
    if not verified:
        notes.append(f"prompt lengths are not verified: a probe of {expected:.0f} tokens was counted as {counted}")
    return Realisation(
        words=realisation.words,
        tokens_per_word=realisation.tokens_per_word,
        overhead_tokens=realisation.overhead_tokens,
        verified=verified,
        note="; ".join(notes),
    )
