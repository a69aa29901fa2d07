"""Reads a `tokenizer.json`: the bytes of each token, and whether tiktoken gives the same ids."""

from collections.abc import Sequence
from typing import Any

from gptddp.errors import DataError

BOS = "<|bos|>"
_BOS_NAMES = (BOS, "<|begin_of_text|>", "<|endoftext|>", "<s>", "<bos>", "[BOS]")
_GPT2_PATTERN = (
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # use_regex
)


def find_bos(special: dict[str, int]) -> int:
    """The id of the special token that starts a document."""
    for name in _BOS_NAMES:
        if name in special:
            return special[name]
    raise DataError(f"has no special token that starts a document: one of {', '.join(_BOS_NAMES)}")


def _byte_level_alphabet() -> dict[str, int]:
    """Byte of each character of the ByteLevel alphabet (GPT-2's `bytes_to_unicode`)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in shown]
    return {chr(b): b for b in shown} | {chr(256 + n): b for n, b in enumerate(hidden)}


def _steps(definition: dict[str, Any]) -> list[dict[str, Any]]:
    """The pre-tokenizer as a list of steps."""
    step = definition.get("pre_tokenizer") or {}
    return list(step.get("pretokenizers", [step]))


def byte_of_each(definition: dict[str, Any]) -> dict[str, int]:
    """The byte of each character of its tokens. Raises DataError unless it is a byte-level BPE."""
    model = definition["model"]
    if model["type"] != "BPE":
        raise DataError(f"is a {model['type']} model: it must be BPE")
    alphabet = _byte_level_alphabet()
    byte_level = any(step.get("type") == "ByteLevel" for step in _steps(definition))
    if not byte_level or not set(alphabet) <= set(model["vocab"]):
        raise DataError("cannot encode every text: it must be byte-level, with all 256 bytes")
    return alphabet


def changes(definition: dict[str, Any]) -> str | None:
    """How the normalizer changes the bytes of a text, in words; None if there is no normalizer."""
    normalizer = definition.get("normalizer")
    if normalizer is None:
        return None
    names = [str(step.get("type")) for step in normalizer.get("normalizers", [normalizer])]
    return f"normalizes it ({', '.join(names)})"


def tiktoken_pattern(definition: dict[str, Any], hf: Any, special: dict[str, int]) -> str | None:
    """The pattern with which tiktoken gives the same ids as this file; None if it would not.

    tiktoken merges the pair whose *result* has the lowest id; `tokenizers` merges the pair that is
    listed first. They agree if the ids of the results rise in the order of the merges, and every
    token alone is merged back to itself.
    """
    pattern, model = _pattern(_steps(definition)), definition["model"]
    affixes = ("continuing_subword_prefix", "end_of_word_suffix")
    odd = any(model.get(key) for key in (*affixes, "ignore_merges"))
    added = len(definition.get("added_tokens") or ())
    if pattern is None or odd or definition.get("normalizer") or added > len(special):
        return None
    pairs = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]  # old files: str
    vocab = {token: i for token, i in model["vocab"].items() if token not in special}
    ids = [vocab[a + b] for a, b in pairs]
    rising = all(a < b for a, b in zip(ids, ids[1:], strict=False))
    if not rising or set(_byte_level_alphabet()) | {a + b for a, b in pairs} != set(vocab):
        return None
    alone = all([t.id for t in hf.model.tokenize(token)] == [i] for token, i in vocab.items())
    return pattern if alone else None


def _pattern(steps: Sequence[dict[str, Any]]) -> str | None:
    *before, last = steps
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        return None
    if not before:
        return _GPT2_PATTERN if last.get("use_regex", True) else None
    if len(before) > 1 or last.get("use_regex", True):
        return None
    split = before[0]
    plain = split.get("behavior") == "Isolated" and not split.get("invert")
    return split["pattern"].get("Regex") if split.get("type") == "Split" and plain else None
