"""SentencePiece tokenizers of GGUF files ("llama" in GGUF) as byte-pair merges, which give the same tokens.

SentencePiece joins the adjacent pair whose joined piece has the highest score, leftmost first, until none is a piece.
Merges ranked by that score do the same, as every pair that makes a piece is among them.
"""

from collections.abc import Sequence
from typing import Any

SPACE_MARK = "\u2581"
_NORMAL, _UNKNOWN = 1, 2
"""Token types of GGUF: only ordinary pieces are joined to."""


def sentencepiece_steps(
    tokens: Sequence[str], types: Sequence[int], scores: Sequence[float], *, space_prefix: bool
) -> dict[str, Any]:
    """The parts of tokenizer.json that differ from byte-level BPE: normalizer, pre_tokenizer, decoder, model.

    space_prefix: text begins with a space mark that decoding drops.
    """
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)
    mark_spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK}
    prepend = [{"type": "Prepend", "prepend": SPACE_MARK}] if space_prefix else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if space_prefix else []
    unmark = {"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "}
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prepend, mark_spaces]},
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [unmark, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": unknown,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": merges_by_score(tokens, types, scores),
        },
    }


def merges_by_score(tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]) -> list[list[str]]:
    """Every way to put a piece together from two others, best score first."""
    pieces = {token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind == _NORMAL}
    ranked: list[tuple[float, int, int, list[str]]] = []
    for piece, i in pieces.items():
        for cut in range(1, len(piece)):
            left, right = pieces.get(piece[:cut]), pieces.get(piece[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[i], left, right, [piece[:cut], piece[cut:]]))
    ranked.sort(key=lambda entry: entry[:3])
    return [pair for _, _, _, pair in ranked]
