import asyncio
from collections.abc import Callable

import pytest

from tailrace.errors import ClientFailed
from tailrace.workload.job import Realisation
from tailrace.workload.realise import PROBES_MAX, calibrate
from tailrace.workload.words import WORDS


class Tokenizer:
    """An endpoint that counts: `overhead`, and of each word the tokens it was given, else one."""

    def __init__(self, overhead: int = 0, **long_words: int) -> None:
        self.overhead = overhead
        self.long_words = long_words
        self.texts: list[str] = []

    async def count(self, text: str) -> int | None:
        self.texts.append(text)
        return self.overhead + sum(self.long_words.get(word, 1) for word in text.split(" "))


def calibrated(tokenizer: Tokenizer) -> Realisation:
    return asyncio.run(calibrate(tokenizer.count))


def counting(function: Callable[[str], int | None]) -> Realisation:
    async def count(text: str) -> int | None:
        return function(text)

    return asyncio.run(calibrate(count))


@pytest.mark.parametrize("overhead", [0, 1, 31])
def test_one_token_a_word_is_verified_in_three_probes_and_the_overhead_found(overhead: int) -> None:
    tokenizer = Tokenizer(overhead)
    found = calibrated(tokenizer)
    assert found == Realisation(words=WORDS, overhead_tokens=overhead, verified=True)
    assert len(tokenizer.texts) == 3


def test_every_word_is_probed_and_no_two_probes_or_calibrations_begin_alike() -> None:
    tokenizer = Tokenizer()
    calibrated(tokenizer)
    calibrated(tokenizer)
    assert set(tokenizer.texts[0].split()) == set(WORDS)
    assert len({tuple(text.split()[:8]) for text in tokenizer.texts}) == 6


def test_a_salt_makes_the_probes_repeatable() -> None:
    one, other = Tokenizer(), Tokenizer()
    asyncio.run(calibrate(one.count, salt="run"))
    asyncio.run(calibrate(other.count, salt="run"))
    assert one.texts == other.texts


def test_words_of_several_tokens_are_found_and_left_out() -> None:
    tokenizer = Tokenizer(5, people=2, world=3)
    found = calibrated(tokenizer)
    assert set(WORDS) - set(found.words) == {"people", "world"}
    assert (found.tokens_per_word, found.overhead_tokens, found.verified) == (1.0, 5, True)
    assert "people" in found.note
    assert len(tokenizer.texts) <= PROBES_MAX


def test_with_more_odd_words_than_probes_the_mean_is_taken_and_the_probes_stay_bounded() -> None:
    tokenizer = Tokenizer(9, **dict.fromkeys(WORDS[::2], 2))
    found = calibrated(tokenizer)
    assert len(tokenizer.texts) <= PROBES_MAX
    assert found.overhead_tokens == 9
    assert found.tokens_per_word == pytest.approx(1.5, abs=0.03)
    assert len(found.words) > 200


def test_a_tokenizer_of_characters_is_realised_by_its_mean() -> None:
    found = counting(lambda text: 3 + len(text) + 1)
    assert found.overhead_tokens == 3
    assert found.tokens_per_word == pytest.approx(sum(map(len, found.words)) / len(found.words) + 1, rel=0.01)


def test_a_count_that_is_not_a_sum_of_words_is_not_called_verified() -> None:
    found = counting(lambda text: (text.count(" ") + 1) if text.count(" ") + 1 in (256, 512) else 700)
    assert not found.verified
    assert "counted as 700" in found.note


@pytest.mark.parametrize("count", [None, 0, -4, 1, 100])
def test_without_a_sensible_count_the_realisation_is_plain_unverified_and_says_so(count: int | None) -> None:
    found = counting(lambda text: count)  # noqa: ARG005
    assert (found.words, found.tokens_per_word, found.overhead_tokens, found.verified) == (WORDS, 1.0, 0, False)
    assert "prompt lengths are not verified" in found.note


def test_an_endpoint_that_fails_a_probe_is_not_hidden() -> None:
    async def count(text: str) -> int | None:  # noqa: ARG001
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError):
        asyncio.run(calibrate(count))


@pytest.mark.parametrize("context_tokens", [128, 300])
def test_a_short_context_is_calibrated_by_short_probes(context_tokens: int) -> None:
    tokenizer = Tokenizer(7, people=2)

    async def count(text: str) -> int | None:
        counted = await tokenizer.count(text)
        if counted is None or counted > context_tokens:
            raise ClientFailed("the prompt is too long")
        return counted

    found = asyncio.run(calibrate(count))
    assert (found.tokens_per_word, found.overhead_tokens, found.verified) == (1.0, 7, True)
    assert set(WORDS) - set(found.words) == {"people"}
    assert len(tokenizer.texts) <= 2 * PROBES_MAX


def test_a_service_that_refuses_every_probe_leaves_the_lengths_unverified_and_says_why() -> None:
    async def count(text: str) -> int | None:  # noqa: ARG001
        raise ClientFailed("the prompt is too long")

    found = asyncio.run(calibrate(count))
    assert not found.verified
    assert "a probe was refused: the prompt is too long" in found.note
