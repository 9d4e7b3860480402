"""Two tiny tokenizers, one of each family, that need no model files."""

from typing import Any

from tokenizers import Tokenizer, models

from tailrace.model.pieces import byte_alphabet

SPECIALS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_level_json(*, bos: bool = False) -> dict[str, Any]:
    """Each byte is a token, and a few merges; ids 0 to 3 are special."""
    alphabet = sorted(byte_alphabet(), key=lambda char: byte_alphabet()[char])
    merges = [["h", "e"], ["l", "l"], ["he", "ll"], ["ð", "Ł"], ["Ġ", "w"]]
    vocab = {token: i for i, token in enumerate([*SPECIALS, *alphabet, *(a + b for a, b in merges)])}
    return {
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
        "padding": None,
        "added_tokens": [_added(token, vocab[token]) for token in SPECIALS],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": _bos_in_front() if bos else None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    }


def sentencepiece_json(scheme: str = "first") -> dict[str, Any]:
    """A few pieces with "▁" for a space, and byte fallback; BOS in front."""
    pieces = ["<unk>", *SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"helowrdtn", "▁h", "lo"]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(token, vocab[token]) for token in ("<unk>", *SPECIALS)],
        "normalizer": None,
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False},
        "post_processor": _bos_in_front(vocab["<s>"]),
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "byte_fallback": True,
            "vocab": vocab,
            "merges": [["▁", "h"], ["l", "o"]],
        },
    }


def word_piece_json() -> dict[str, Any]:
    """A family that cannot be turned into text token by token."""
    import json

    value: dict[str, Any] = json.loads(Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]")).to_str())
    return {**value, "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}


def _added(content: str, token_id: int) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": token_id, "content": content, **flags}


def _bos_in_front(token_id: int = 0) -> dict[str, Any]:
    return {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [token_id], "tokens": ["<s>"]}},
    }
