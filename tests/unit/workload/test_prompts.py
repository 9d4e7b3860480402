from collections import Counter

import pytest

from tailrace.workload.job import Realisation
from tailrace.workload.plan import Segment
from tailrace.workload.prompts import SALT_WORDS, prompt_text, segment_text, without_overhead
from tailrace.workload.words import WORDS

PLAIN = Realisation(words=WORDS)


def words(key: str, num_tokens: int, realisation: Realisation = PLAIN) -> list[str]:
    return segment_text(key, num_tokens, realisation).split(" ")


def test_one_byte_chooses_one_of_256_words() -> None:
    assert len(WORDS) == len(set(WORDS)) == 256
    assert all(word.isascii() and word.isalpha() and word.islower() for word in WORDS)


def test_text_of_a_key_is_the_same_for_ever() -> None:
    """Kept as text: a change here would make two versions' runs of one seed differ."""
    assert segment_text("run/0/0", 8, PLAIN) == "when local kind life later the too or"


def test_a_token_is_a_word_until_the_endpoint_says_otherwise() -> None:
    assert len(words("k", 250)) == 250
    assert len(words("k", 250, Realisation(words=WORDS, tokens_per_word=1.25))) == 200
    assert len(words("k", 0)) == 1


@pytest.mark.parametrize("tokens_per_word", [1.0, 1.3])
def test_the_shorter_of_one_key_begins_the_longer(tokens_per_word: float) -> None:
    realisation = Realisation(words=WORDS[:200], tokens_per_word=tokens_per_word)
    whole = words("k", 500, realisation)
    for num_tokens in (1, 7, 8, 64, 168, 169, 499):
        short = words("k", num_tokens, realisation)
        assert short == whole[: len(short)]


def test_the_first_eight_words_tell_keys_apart() -> None:
    starts = {segment_text(f"run/{index}/0", SALT_WORDS, PLAIN) for index in range(20_000)}
    assert len(starts) == 20_000


def test_words_come_alike_often() -> None:
    counts = Counter(words("k", 256 * 400))
    assert len(counts) == 256
    # 400 expected, standard deviation 20.
    assert min(counts.values()) > 300
    assert max(counts.values()) < 500


def test_words_left_out_do_not_come() -> None:
    assert set(words("k", 5_000, Realisation(words=WORDS[:200]))) == set(WORDS[:200])


def test_segments_are_joined_by_one_space_so_that_their_tokens_add_up() -> None:
    text = prompt_text([Segment("a", 10), Segment("b", 5)], PLAIN)
    assert text == segment_text("a", 10, PLAIN) + " " + segment_text("b", 5, PLAIN)
    assert text.count(" ") == 14


def test_the_templates_tokens_are_taken_from_the_unshared_end() -> None:
    shared, own = Segment("shared", 900), Segment("own", 60)
    assert without_overhead((shared, own), 31) == (shared, Segment("own", 29))
    assert without_overhead((shared, own), 0) == (shared, own)


def test_no_segment_is_cut_below_its_salt() -> None:
    shared, own = Segment("shared", 900), Segment("own", 20)
    assert without_overhead((shared, own), 31) == (Segment("shared", 881), Segment("own", SALT_WORDS))
    assert without_overhead((Segment("own", 5),), 31) == (Segment("own", 5),)
