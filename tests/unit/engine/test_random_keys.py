"""The draws are uniform, independent of each other as far as tests tell, and a function of their key alone."""

import numpy as np
import pytest

from tailrace.engine.random_keys import PURPOSE_TOKEN, uniforms

NUM_DRAWS = 20_000
# Chi-square with 99 degrees of freedom is above 160 with probability 1e-4; the draws are fixed, so the tests are too.
CHI_SQUARE_MAX = 160.0


def along(word: str, count: int = NUM_DRAWS) -> np.ndarray:
    """Draws whose keys differ in one word only."""
    fixed, moving = [7] * count, list(range(count))
    keys = {"seed": fixed, "choice": fixed, "position": fixed} | {word: moving}
    return uniforms(keys["seed"], keys["choice"], keys["position"], PURPOSE_TOKEN)


def chi_square(counts: np.ndarray) -> float:
    expected = counts.sum() / counts.size
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("word", ["seed", "choice", "position"])
def test_draws_are_uniform_along_each_word_of_the_key(word: str) -> None:
    draws = along(word)
    assert draws.min() >= 0.0
    assert draws.max() < 1.0
    assert chi_square(np.histogram(draws, bins=100, range=(0, 1))[0]) < CHI_SQUARE_MAX


@pytest.mark.parametrize("word", ["seed", "choice", "position"])
@pytest.mark.parametrize("lag", [1, 2, 32])
def test_neighbouring_keys_draw_independently(word: str, lag: int) -> None:
    draws = along(word)
    pairs, _, _ = np.histogram2d(draws[:-lag], draws[lag:], bins=10, range=((0, 1), (0, 1)))
    assert chi_square(pairs) < CHI_SQUARE_MAX


def test_swapped_words_are_other_keys() -> None:
    small = range(12)
    keys = [(seed, choice, position) for seed in small for choice in small for position in small]
    seeds, choices, positions = (list(words) for words in zip(*keys, strict=True))
    assert len(set(uniforms(seeds, choices, positions, PURPOSE_TOKEN))) == len(keys)


def test_purposes_draw_independently() -> None:
    keys = [1] * NUM_DRAWS, [0] * NUM_DRAWS, list(range(NUM_DRAWS))
    correlation = np.corrcoef(uniforms(*keys, 0), uniforms(*keys, 1))[0, 1]
    assert abs(correlation) < 4 / NUM_DRAWS**0.5


def test_a_draw_does_not_depend_on_the_batch() -> None:
    batch = uniforms([3, 9, 3], [0, 1, 2], [17, 4, 5], PURPOSE_TOKEN)
    alone = [uniforms([s], [c], [p], PURPOSE_TOKEN)[0] for s, c, p in ((3, 0, 17), (9, 1, 4), (3, 2, 5))]
    assert batch.tolist() == alone


def test_the_draws_of_a_seed_never_change_between_releases() -> None:
    draws = uniforms([0, 42, -1], [0, 0, 3], [0, 100, 7], PURPOSE_TOKEN)
    assert draws.tolist() == PINNED


def test_seeds_count_modulo_two_to_the_64() -> None:
    same = uniforms([5, 5 + 2**64, 5 - 2**64], [0] * 3, [0] * 3, PURPOSE_TOKEN)
    assert len(set(same)) == 1


PINNED = [0.1296456182997474, 0.1265342990916174, 0.6250599992801229]
