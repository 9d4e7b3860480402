"""Hop 12: what each token adds to the text, as bytes. A table per tokenizer, never the whole-text decoder a token.

Two families are known: byte-level BPE (each character of a piece stands for one byte) and SentencePiece pieces
("\\u2581" for a space, `<0xNN>` for a byte). Special tokens add nothing.
"""

import re
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer

from tailrace.errors import ModelRefused

_SPACE_MARK = "\u2581"
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SENTENCEPIECE_STEPS = frozenset({"Sequence", "Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"})


def byte_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE: printable Latin-1 stands for itself, the other bytes for U+0100 upwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return table


class PieceTable:
    """Token id -> bytes. Filled as tokens are met: a vocabulary of 150,000 need not be walked at start."""

    def __init__(self, tokenizer: Tokenizer, decoder: Mapping[str, Any] | None) -> None:
        """Raises ModelRefused for a decoder of another family. `decoder` is that entry of tokenizer.json."""
        steps = _step_types(decoder)
        self._tokenizer = tokenizer
        self._alphabet = byte_alphabet() if "ByteLevel" in steps else None
        if self._alphabet is None and not steps <= _SENTENCEPIECE_STEPS:
            raise ModelRefused(
                f"the tokenizer's decoder ({', '.join(sorted(steps))}) is neither byte-level nor SentencePiece, so its "
                "tokens cannot be turned into text one by one; serve this model with vllm"
            )
        self.strips_leading_space = self._alphabet is None and _strips_leading_space(decoder)
        added = tokenizer.get_added_tokens_decoder()
        self._known: dict[int, bytes] = {i: b"" if t.special else t.content.encode() for i, t in added.items()}
        self.special_texts: dict[int, str] = {i: t.content for i, t in added.items() if t.special}

    def bytes_of(self, token_id: int) -> bytes:
        """b"" for special tokens and for ids that the vocabulary does not have (models pad theirs)."""
        known = self._known.get(token_id)
        if known is not None:
            return known
        piece = self._tokenizer.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        if piece is None:
            return b""
        value = self._piece_bytes(piece)
        self._known[token_id] = value
        return value

    def _piece_bytes(self, piece: str) -> bytes:
        if self._alphabet is not None:
            table = self._alphabet
            return b"".join(bytes((table[c],)) if c in table else c.encode() for c in piece)
        match = _BYTE_PIECE.fullmatch(piece)
        if match is not None:
            return bytes((int(match[1], 16),))
        return piece.replace(_SPACE_MARK, " ").encode()


def _step_types(decoder: Mapping[str, Any] | None) -> frozenset[str]:
    if decoder is None:
        return frozenset({"Sequence"})
    inner: frozenset[str] = frozenset()
    for step in decoder.get("decoders", ()):
        inner |= _step_types(step)
    return inner | {str(decoder.get("type"))}


def _strips_leading_space(decoder: Mapping[str, Any] | None) -> bool:
    """Whether decoding drops the space that encoding put in front."""
    if decoder is None:
        return False
    if decoder.get("type") == "Strip":
        return bool(decoder.get("content") == " ") and int(decoder.get("start", 0)) > 0
    if decoder.get("type") == "Metaspace":
        return bool(decoder.get("prepend_scheme", "always") != "never")
    return any(_strips_leading_space(step) for step in decoder.get("decoders", ()))
