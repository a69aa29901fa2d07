"""Tokenizers: text to token ids and back, trained or given as a `tokenizer.json`, or plain bytes.

tiktoken encodes for a byte-level BPE file, several times faster than `tokenizers`; if their ids
would differ, `tokenizers` itself encodes.
"""

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from gptddp.data.tokenizer_json import BOS, byte_of_each, changes, find_bos, tiktoken_pattern
from gptddp.errors import DataError
from gptddp.files import may_pass, parse_json

MIN_VOCAB = 257  # 256 bytes and <|bos|>

# Like GPT-4's pattern, with every repeat possessive or bounded: a run of a million spaces costs
# linear time and no stack. Both regex engines (fancy-regex in tiktoken, Oniguruma in tokenizers)
# read it alike: no (?i), no {n,m}+. Numbers are cut into pairs of digits, which suits small
# vocabularies; white space at the end of a line is in one token with the line end.
PATTERN = "|".join(
    (
        r"'(?:[sdmtSDMT]|[lL][lL]|[vV][eE]|[rR][eE])",
        r"[^\r\n\p{L}\p{N}]?+\p{L}++",
        r"\p{N}{1,2}",
        r" ?+[^\s\p{L}\p{N}]++[\r\n]*+",
        r"[^\S\r\n]{0,128}[\r\n]++",
        r"[^\S\r\n]{1,128}(?!\S)",
        r"\s",
    )
)
# Text that likely gives other tokens if two regex engines read a pattern differently.
_PROBE = (
    "I'LL we've 'Tis it'ſ\u0301 x1234567 3,14\u00bd \u0661\u0662\u0663\u0664 \t\t  if\r\n\r\n   \n"
    " \u3000\u00a0\u2028\x85\x1c\x00\x7f naïve e\u0301 ÅΩßﬁ ЖЗ 漢字かな한국어 🙂‍🔥 \ue000\U0010ffff"
    " !!!???\n\n    \t)) <|bos|> __init__  \n  a\u200bb \u0130i\u0307 \ufeff end   "
)

# Training time is quadratic in the longest word: a megabyte without a space would never end.
_LONG_RUN = re.compile(r"\S{256}(?=\S)")

Encoder = Callable[[str], np.ndarray]


class Tokenizer(ABC):
    """Text to token ids and back; made by `load_tokenizer` or `byte_tokenizer`.

    kind: "bpe" or "bytes". sha256: hex, over all that determines the ids. bos: id of the token that
    starts a document. token_bytes: int32[vocab_size], true length of each token in UTF-8 bytes, 0
    for special tokens. merges: pairs of tokens, in the order of their use; empty for bytes. dtype:
    uint16 if every id fits, else uint32. changes: how the tokenizer changes a text, so that its
    tokens have other bytes; None if it does not. library: the library that encodes, with its
    version, as "tiktoken 0.9.0"; None if there is none.
    """

    kind: str
    vocab_size: int
    bos: int
    sha256: str
    token_bytes: np.ndarray
    merges: Sequence[tuple[str, ...]] = ()
    changes: str | None = None
    library: str | None = None

    def warnings(self) -> list[str]:
        """One line for each limitation of this tokenizer."""
        if self.changes is None:
            return []
        return [
            f"val_bpb is not computed: the tokenizer {self.changes}, so the bytes of a text and of "
            "its tokens differ; val_loss is correct"
        ]

    @property
    def dtype(self) -> type[np.uint16] | type[np.uint32]:
        return np.uint16 if self.vocab_size <= 65536 else np.uint32

    @abstractmethod
    def encoder(self) -> Encoder:
        """Return a new function from text to ids, 1-D of `dtype`; make one in each thread.

        A literal "<|bos|>" in the text is encoded as its characters, and no token is added. Use an
        encoder in one thread only: the cache of tiktoken's regular expression belongs to the first
        thread that uses it; any other thread takes 1.5 times as long.
        """

    @abstractmethod
    def to_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of these ids; special tokens have none."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of these ids; special tokens are skipped, broken UTF-8 becomes U+FFFD."""
        return self.to_bytes(ids).decode("utf-8", "replace")


class _Bytes(Tokenizer):
    kind = "bytes"
    vocab_size = MIN_VOCAB
    bos = 256
    sha256 = hashlib.sha256(b"gptddp bytes 1").hexdigest()

    def __init__(self) -> None:
        self.token_bytes = np.array([1] * 256 + [0], np.int32)

    def encoder(self) -> Encoder:
        return lambda text: np.frombuffer(text.encode(), np.uint8).astype(np.uint16)

    def to_bytes(self, ids: Iterable[int]) -> bytes:
        return bytes(i for i in ids if i < 256)


class _Bpe(Tokenizer):
    kind = "bpe"

    def __init__(self, definition: dict[str, Any]) -> None:
        kept = {k: v for k, v in definition.items() if k not in ("truncation", "padding")}
        self.sha256 = hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()
        added = {t["content"]: t for t in definition.get("added_tokens") or ()}
        self._special = {text: t["id"] for text, t in added.items() if t["special"]}
        vocab = definition["model"]["vocab"] | {text: t["id"] for text, t in added.items()}
        self.vocab_size = max(vocab.values()) + 1
        self.bos = find_bos(self._special)
        self._raw = [b""] * self.vocab_size
        byte = byte_of_each(definition)
        for text, i in vocab.items():
            if text not in self._special:
                self._raw[i] = text.encode() if text in added else bytes(byte[c] for c in text)
        self.token_bytes = np.array([len(raw) for raw in self._raw], np.int32)
        pairs = definition["model"].get("merges") or ()
        self.merges = [tuple(m.split(" ") if isinstance(m, str) else m) for m in pairs]
        # special tokens, post-processing, truncation, padding and dropout must not change the ids
        plain = [t for t in definition.get("added_tokens") or () if not t["special"]]
        off = dict(added_tokens=plain, post_processor=None, truncation=None, padding=None)
        off["model"] = definition["model"] | {"dropout": None}
        self._hf = tokenizers.Tokenizer.from_str(json.dumps(definition | off))
        self._pattern = tiktoken_pattern(definition, self._hf, self._special)
        if self._pattern is not None:
            probe = np.array_equal(self._tiktoken()(_PROBE), self._encode_hf(_PROBE))
            self._pattern = self._pattern if probe else None
        used = tokenizers if self._pattern is None else tiktoken
        self.library = f"{used.__name__} {used.__version__}"
        n_bytes = int(self.token_bytes[self.encoder()(_PROBE)].sum())
        other = "adds to a text, or drops some of it" if n_bytes != len(_PROBE.encode()) else None
        self.changes = changes(definition) or other

    def encoder(self) -> Encoder:
        return self._encode_hf if self._pattern is None else self._tiktoken()

    def _encode_hf(self, text: str) -> np.ndarray:
        return np.array(self._hf.encode(text, add_special_tokens=False).ids, self.dtype)

    def _tiktoken(self) -> Encoder:
        special = set(self._special.values())
        encoding = tiktoken.Encoding(
            "gptddp",
            pat_str=self._pattern or "",
            mergeable_ranks={raw: i for i, raw in enumerate(self._raw) if i not in special and raw},
            special_tokens=self._special,
        )

        def encode(text: str) -> np.ndarray:
            try:
                ids = encoding.encode_to_numpy(text, allowed_special=set(), disallowed_special=())
            except ValueError:  # the pattern backtracks too far, as GPT-2's does on long runs
                return self._encode_hf(text)
            return ids.astype(self.dtype)

        return encode

    def to_bytes(self, ids: Iterable[int]) -> bytes:
        return b"".join(self._raw[int(i)] for i in ids)


# -- making and loading --------------------------------------------------------------------------


def byte_tokenizer() -> Tokenizer:
    """The tokenizer of 256 bytes and <|bos|> (id 256)."""
    return _Bytes()


def train_bpe(texts: Iterable[str], vocab_size: int) -> str:
    """Train a byte-level BPE; returns the content of its tokenizer.json.

    Neither the order of the texts nor the number of threads changes the content. The vocabulary is
    smaller than `vocab_size` if no more pair occurs twice.
    """
    tokenizer = tokenizers.Tokenizer(models.BPE())
    split = pre_tokenizers.Split(tokenizers.Regex(PATTERN), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[BOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((_LONG_RUN.sub(r"\g<0>\n", text) for text in texts), trainer)
    return tokenizer.to_str(pretty=True)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load a tokenizer.json; raises DataError, with the fix, if it cannot be used.

    Raises OSError for an error of the volume that may pass.
    """
    try:
        definition = parse_json(Path(path).read_bytes())
    except OSError as error:
        if may_pass(error):
            raise
        raise DataError(f"cannot read the tokenizer {path}: {error.strerror}") from error
    except ValueError as error:
        raise DataError(f"{path} is not a tokenizer.json: {error}; give a file as {_FIX}") from None
    try:
        return _Bpe(definition)
    except DataError as error:
        raise DataError(f"{path} {error}; give a file as {_FIX}") from None
    except Exception as error:  # tokenizers raises plain Exception if it cannot read the file
        raise DataError(
            f"{path} is not a usable tokenizer.json ({type(error).__name__}: {error}); "
            f"give a file as {_FIX}"
        ) from error


def same_ids(a: Tokenizer, b: Tokenizer) -> bool:
    """Do both give the same ids?

    They do if the files are the same; or if tokens, merges and the ids of an odd text are: a
    library may write the same tokenizer differently.
    """
    if a.sha256 == b.sha256:
        return True
    tokens = [(t.vocab_size, t.bos, [t.to_bytes([i]) for i in range(t.vocab_size)]) for t in (a, b)]
    same = tokens[0] == tokens[1] and a.merges == b.merges
    return same and np.array_equal(a.encoder()(_PROBE), b.encoder()(_PROBE))


_FIX = "the `tokenizers` package saves for a byte-level BPE, or omit --tokenizer to train one"
