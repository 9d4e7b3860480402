"""How prompts of words become prompts of tokens at one endpoint: a few probes that it counts.

In: a function that sends a text and says how many prompt tokens the endpoint counted. Out: a `Realisation`. A count is
taken as overhead + sum of each word's tokens, and the last probe, of drawn words, checks that this is so.
"""

import hashlib
import uuid
from collections.abc import Awaitable, Callable, Sequence

from tailrace.errors import ClientFailed
from tailrace.workload.job import Realisation
from tailrace.workload.prompts import segment_text
from tailrace.workload.words import WORDS

CountPromptTokens = Callable[[str], Awaitable[int | None]]

PROBES_MAX = 24
_WORDS_MIN = 128
"""With fewer words left, drop none and use the mean."""
_WORDS_SHORT = 32
_TOLERANCE_RATIO = 0.01


class _NoCount(Exception):
    """The endpoint gave no count, or one that no text can have."""


async def calibrate(count_prompt_tokens: CountPromptTokens, *, salt: str | None = None) -> Realisation:
    """At most 24 probes of at most 512 words; where one is refused (ClientFailed: the context may be short), at most 24
    more of at most 64. Other errors of `count_prompt_tokens` pass through.

    Verified when a prompt of drawn words has the predicted count to 1 % (at least one token). Without counts the
    realisation is one token a word, no overhead, unverified, and its note says so.
    """
    try:
        for num_words in (len(WORDS), _WORDS_SHORT):
            prober = _Prober(count_prompt_tokens, salt or uuid.uuid4().hex, num_words)
            try:
                return await _calibrate(prober)
            except ClientFailed as error:
                why = f"a probe was refused: {error.message}"
    except _NoCount as error:
        why = str(error)
    return Realisation(words=WORDS, note=f"prompt lengths are not verified: {why}; one token a word is assumed")


class _Prober:
    """Counts texts, each of which begins differently."""

    def __init__(self, count_prompt_tokens: CountPromptTokens, salt: str, num_words: int) -> None:
        """`num_words`: of a probe, at most twice as many."""
        self._count = count_prompt_tokens
        self._salt = salt
        self.parts = [WORDS[begin : begin + num_words] for begin in range(0, len(WORDS), num_words)]
        self.num_check_words = num_words * 3 // 2
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
        num_tokens = round(self.num_check_words * realisation.tokens_per_word)
        return await self._tokens_of(segment_text(key, num_tokens, realisation))

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
    counted = [await prober.tokens(part) for part in prober.parts]
    once, first = counted[0], prober.parts[0]
    twice = await prober.tokens(first, times=2)
    overhead = 2 * once - twice
    costs = [each - overhead for each in counted]
    if overhead < 0 or min(costs) < len(first) // 4:
        raise _NoCount(f"its counts make no sense ({once} tokens of {len(first)} words, {twice} of twice as many)")
    dropped = await _long_words(prober, list(zip(prober.parts, costs, strict=True)), overhead)
    words, cost = tuple(word for word in WORDS if word not in dropped), sum(costs) - sum(dropped.values())
    if len(words) < _WORDS_MIN:
        words, cost, dropped = WORDS, sum(costs), {}
    realisation = Realisation(words=words, tokens_per_word=cost / len(words), overhead_tokens=overhead)
    return await _checked(prober, realisation, list(dropped))


async def _long_words(prober: _Prober, parts: list[tuple[Sequence[str], int]], overhead: int) -> dict[str, int]:
    """Words of more or less than one token, each with its tokens, by halving parts whose tokens are known, while
    probes last (one is kept)."""
    found: dict[str, int] = {}
    while parts:
        part, part_cost = parts.pop(0)
        if part_cost == len(part):
            continue
        if len(part) == 1:
            found[part[0]] = part_cost
            continue
        if prober.num_probes >= PROBES_MAX - 1:
            break
        half = len(part) // 2
        left_cost = await prober.tokens(part[:half]) - overhead
        parts += [(part[:half], left_cost), (part[half:], part_cost - left_cost)]
    return found


async def _checked(prober: _Prober, realisation: Realisation, dropped: Sequence[str]) -> Realisation:
    expected = realisation.overhead_tokens + prober.num_check_words * realisation.tokens_per_word
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
