"""The tokenizer of a GGUF file (`tokenizer.ggml.*`) as a tokenizer.json of the `tokenizers` library.

Byte-level BPE ("gpt2" in GGUF) and SentencePiece ("llama", gguf_sentencepiece.py). How byte-level BPE cuts text before
merging is named by `tokenizer.ggml.pre`; the cuts below are llama.cpp's (src/llama-vocab.cpp), and an unknown name is
refused: a wrong cut gives other tokens without an error.
"""

import re
from collections.abc import Mapping
from typing import Any

from tailrace.errors import ModelRefused, ModelSourceError
from tailrace.model.gguf_sentencepiece import sentencepiece_steps

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5
"""Token types of GGUF (`llama_token_type` of llama.cpp); the others are ordinary pieces."""

_LETTERS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Common to Llama 3 and Qwen 2, which differ in how many digits stay together."""
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
_GPT2 = {**_BYTES, "use_regex": True}
_SINGLE_DIGITS = {"type": "Digits", "individual_digits": True}


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


_LLAMA3 = [_split(_LETTERS % "{1,3}"), _BYTES]
_QWEN2 = [_split(_LETTERS % ""), _BYTES]
_DEFAULT = [
    _split(r"[\p{P}\$\+<=>\^~\|]+"),
    _split(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"),
    _split(r"\p{N}+"),
    _split("[0-9][0-9][0-9]"),
    _BYTES,
]

_GROUPS: list[tuple[tuple[str, ...], list[dict[str, Any]]]] = [
    (("smollm", "starcoder", "refact", "command-r", "codeshell", "minerva-7b"), [_SINGLE_DIGITS, _GPT2]),
    (("gpt-2", "olmo", "phi-2", "mpt", "jina-es", "jina-de"), [_GPT2]),
    (("llama-bpe", "llama3", "llama-v3", "dbrx", "smaug-bpe", "falcon3"), _LLAMA3),
    (("qwen2", "stablelm2", "deepseek-r1-qwen", "megrez"), _QWEN2),
    (("default",), _DEFAULT),
]
_PRE_TOKENIZERS = {name: steps for names, steps in _GROUPS for name in names}
_WHOLE_WORDS_FIRST = frozenset({"llama-bpe", "llama3", "llama-v3", "falcon3"})
"""A word that is a token is taken whole, without merging (`ignore_merges`); these also begin with BOS by default."""
_COMPOSED = frozenset({"qwen2", "deepseek-r1-qwen"})
"""Unicode NFC first, as in Qwen's own tokenizer.json."""


def tokenizer_json(keys: Mapping[str, Any]) -> dict[str, Any]:
    """tokenizer.json from a GGUF file's keys.

    Raises ModelRefused for a tokenizer of another kind, ModelSourceError for tables that do not fit together.
    """
    tokens, types = _tokens(keys)
    pre = _pre_name(keys)
    steps = _sentencepiece(keys, tokens, types) if pre is None else _byte_level(keys, tokens, types, pre)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added_token(i, tokens[i], kind) for i, kind in enumerate(types) if _is_added(kind)],
        "post_processor": _post_processor(keys, tokens, default=pre is None or pre in _WHOLE_WORDS_FIRST),
        **steps,
    }


def _byte_level(keys: Mapping[str, Any], tokens: list[str], types: list[int], pre: str) -> dict[str, Any]:
    return {
        "normalizer": {"type": "NFC"} if pre in _COMPOSED else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _PRE_TOKENIZERS[pre]},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre in _WHOLE_WORDS_FIRST,
            "vocab": {token: i for i, token in enumerate(tokens) if types[i] != _UNUSED},
            "merges": _merges(keys),
        },
    }


def _sentencepiece(keys: Mapping[str, Any], tokens: list[str], types: list[int]) -> dict[str, Any]:
    scores = keys.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise ModelSourceError("the GGUF file's scores do not match its tokens; get the file again")
    prefix = bool(keys.get("tokenizer.ggml.add_space_prefix", True))
    return sentencepiece_steps(tokens, types, scores, space_prefix=prefix)


def token_names(keys: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token, ... as a chat template names them."""
    tokens, _ = _tokens(keys)
    wanted = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    found: dict[str, str] = {}
    for name, key in wanted.items():
        token_id = keys.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(token_id, int) and 0 <= token_id < len(tokens):
            found[name] = tokens[token_id]
    return found


_TURN_ENDS = frozenset({"<|im_end|>", "<|eot_id|>", "<|end|>", "<|endoftext|>", "<end_of_turn>", "<|eom_id|>"})


def end_token_ids(keys: Mapping[str, Any]) -> tuple[int, ...]:
    """What ends an answer: the file's eos, eot and eom, and control tokens that are known to end a turn."""
    tokens, types = _tokens(keys)
    ids = {keys.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")}
    ids |= {i for i, token in enumerate(tokens) if types[i] == _CONTROL and token in _TURN_ENDS}
    return tuple(sorted(i for i in ids if isinstance(i, int) and 0 <= i < len(tokens)))


def _pre_name(keys: Mapping[str, Any]) -> str | None:
    """The name of the rules by which byte-level BPE cuts text; None for SentencePiece, which does not cut."""
    kind = keys.get("tokenizer.ggml.model")
    if kind == "llama":
        return None
    if kind != "gpt2":
        raise ModelRefused(
            f"the GGUF file's tokenizer is of the kind {kind!r}, of which byte-level BPE (gpt2) and SentencePiece "
            "(llama) are read here; export the original model with optimum-cli, or run the file with llama.cpp"
        )
    pre = keys.get("tokenizer.ggml.pre", "default")
    if pre not in _PRE_TOKENIZERS:
        raise ModelRefused(
            f"the GGUF file cuts text by the rules {pre!r}, which are not known here, and other rules would give other "
            "tokens; run the file with llama.cpp"
        )
    return str(pre)


def _tokens(keys: Mapping[str, Any]) -> tuple[list[str], list[int]]:
    tokens = keys.get("tokenizer.ggml.tokens")
    types = keys.get("tokenizer.ggml.token_type")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens) or not tokens:
        raise ModelSourceError("the GGUF file has no list of tokens; get a file made by a current llama.cpp")
    if types is None:
        types = [1] * len(tokens)
    if not isinstance(types, list) or len(types) != len(tokens):
        raise ModelSourceError("the GGUF file's token types do not match its tokens; get the file again")
    return tokens, types


def _merges(keys: Mapping[str, Any]) -> list[list[str]]:
    pairs = [merge.split(" ") for merge in keys.get("tokenizer.ggml.merges") or () if isinstance(merge, str)]
    if not pairs or any(len(pair) != 2 for pair in pairs):
        raise ModelSourceError("the GGUF file's list of merges is missing or broken; get the file again")
    return pairs


def _is_added(kind: int) -> bool:
    return kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)


def _added_token(token_id: int, content: str, kind: int) -> dict[str, Any]:
    special = kind in (_UNKNOWN, _CONTROL)
    return {
        "id": token_id,
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": not special and re.search(r"\s", content) is not None,
        "special": special,
    }


def _post_processor(keys: Mapping[str, Any], tokens: list[str], *, default: bool) -> dict[str, Any] | None:
    """Adds the model's BOS in front, if it wants one; `default` when the file does not say."""
    wanted = keys.get("tokenizer.ggml.add_bos_token", default)
    bos = keys.get("tokenizer.ggml.bos_token_id")
    if not wanted or not isinstance(bos, int) or not 0 <= bos < len(tokens):
        return None
    text = {"Sequence": {"id": "A", "type_id": 0}}
    front = {"SpecialToken": {"id": tokens[bos], "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [front, text],
        "pair": [front, text, front, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {tokens[bos]: {"id": tokens[bos], "ids": [bos], "tokens": [tokens[bos]]}},
    }
