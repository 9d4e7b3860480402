"""SentencePiece as merges gives the tokens of SentencePiece's own rule, written here in a few obvious lines."""

import itertools
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tailrace.model.gguf_tokenizer import tokenizer_json
from tailrace.model.text import TextModel

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
LETTERS = ["▁", *"abc"]


def keys(pieces: list[str], **more: Any) -> dict[str, Any]:
    """The keys of a GGUF file whose earlier pieces score higher, as trained ones do."""
    tokens = ["<unk>", "<s>", "</s>", *BYTES, *pieces]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.scores": [-float(i) for i in range(len(tokens))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


def greedy(text: str, table: dict[str, Any]) -> list[int]:
    """Join the adjacent pair of the highest score, leftmost first; what is left and no piece becomes bytes."""
    tokens = table["tokenizer.ggml.tokens"]
    scores = dict(zip(tokens, table["tokenizer.ggml.scores"], strict=True))
    pieces = {token: i for i, token in enumerate(tokens) if table["tokenizer.ggml.token_type"][i] == 1}
    parts = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        joined = [(scores[a + b], -i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in pieces]
        if not joined:
            break
        at = -max(joined)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    ids = [[pieces[part]] if part in pieces else [3 + byte for byte in part.encode()] for part in parts]
    return [token_id for group in ids for token_id in group]


@given(
    longer=st.lists(st.text(alphabet="▁abc", min_size=2, max_size=5), unique=True, max_size=25),
    text=st.text(alphabet="abc zé🎉", max_size=25),
)
def test_tokens_are_those_of_the_greedy_rule(longer: list[str], text: str) -> None:
    table = keys([*longer, *LETTERS])
    model = TextModel(tokenizer_json(table))
    ids = model.encode(text, special=False)
    assert ids == greedy(text, table)
    assert model.decode(ids) == text


def test_bos_is_added_unless_the_file_says_no() -> None:
    assert TextModel(tokenizer_json(keys(LETTERS))).encode("a", special=True)[0] == 1
    silent = TextModel(tokenizer_json(keys(LETTERS, add_bos_token=False)))
    assert 1 not in silent.encode("a", special=True)


def test_the_space_in_front_is_left_out_when_the_file_says_so() -> None:
    model = TextModel(tokenizer_json(keys(LETTERS, add_space_prefix=False)))
    ids = model.encode("a b", special=False)
    assert [model.token_text(i) for i in ids] == ["a", " ", "b"]
    assert model.decode(model.encode(" a", special=False)) == " a"
