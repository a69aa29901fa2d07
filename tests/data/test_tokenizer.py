"""Tokenizers: both encoders agree, ids are exact, and odd or long texts work."""

import json
import os
import subprocess
import sys
import sysconfig
import threading
from pathlib import Path

import numpy as np
import pytest
from support.paths import ROOT, TESTS
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from gptddp.data import tokenizer
from gptddp.data.tokenizer import _Bpe, byte_tokenizer, load_tokenizer, train_bpe
from gptddp.errors import DataError

STDLIB = Path(sysconfig.get_paths()["stdlib"])
ODD = (
    " \t\n\r\x00\x1c\x85\xa0\u200b\u2028\u3000'sſKlLvVeE_019½٣"
    "éß\u0301漢かЖ🙂\u200d\ue000\U0010ffff!<|>"
)


def python_files(count: int) -> list[str]:
    """Some of the standard library, the same files each time."""
    return [path.read_text("utf-8") for path in sorted(STDLIB.glob("*.py"))[:count]]


@pytest.fixture(scope="module")
def definition() -> str:
    """A tokenizer.json trained on real text."""
    return train_bpe(python_files(60), 1500)


@pytest.fixture(scope="module")
def bpe(definition: str, tmp_path_factory: pytest.TempPathFactory) -> tokenizer.Tokenizer:
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    path.write_text(definition, "utf-8")
    return load_tokenizer(path)


def load(tmp_path: Path, definition: str) -> tokenizer.Tokenizer:
    (tmp_path / "tokenizer.json").write_text(definition, "utf-8")
    return load_tokenizer(tmp_path / "tokenizer.json")


def ids_of_huggingface(definition: str, text: str) -> list[int]:
    return list(Tokenizer.from_str(definition).encode(text, add_special_tokens=False).ids)


def gpt2_like() -> Tokenizer:
    """A tokenizer like GPT-2's: with its pattern, and the special token last."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=alphabet, special_tokens=[], show_progress=False
    )
    tokenizer.train_from_iterator(python_files(10), trainer)
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer


# -- the same ids --------------------------------------------------------------------------------


def test_real_text_has_the_ids_of_huggingface(bpe: tokenizer.Tokenizer, definition: str) -> None:
    """tiktoken's ids equal those of `tokenizers` on a megabyte of files it was not trained on."""
    assert isinstance(bpe, _Bpe) and bpe._pattern is not None  # tiktoken encodes
    encode, reference = bpe.encoder(), Tokenizer.from_str(definition)
    texts = python_files(120)[60:]
    assert sum(map(len, texts)) > 1e6
    for text in texts:
        assert encode(text).tolist() == reference.encode(text).ids


def test_every_character_has_the_ids_of_huggingface(
    bpe: tokenizer.Tokenizer, definition: str
) -> None:
    """Every code point, between letters, numbers, spaces and ends of lines, is cut alike."""
    encode, reference = bpe.encoder(), Tokenizer.from_str(definition)
    points = [c for c in range(0x20000) if not 0xD800 <= c < 0xE000] + [0xE0001, 0x10FFFF]
    for first in range(0, len(points), 64):
        chars = map(chr, points[first : first + 64])
        text = "".join(f"a{c}1 {c}{c}\n{c}b'{c}s\t{c}" for c in chars)
        assert encode(text).tolist() == reference.encode(text).ids, hex(points[first])


def test_random_odd_text_has_the_ids_of_huggingface_and_decodes_to_itself(
    bpe: tokenizer.Tokenizer, definition: str
) -> None:
    """Random strings of unusual characters, and repetitions of them, agree and decode exactly."""
    encode, reference = bpe.encoder(), Tokenizer.from_str(definition)
    random = np.random.RandomState(7)
    for _ in range(1500):
        runs = random.randint(1, 4) ** random.randint(0, 6, size=random.randint(1, 30))
        text = "".join(
            ODD[i] * n for i, n in zip(random.randint(0, len(ODD), 30), runs, strict=False)
        )
        if "<|bos|>" in text:
            continue  # `tokenizers` would encode a special token
        ids = encode(text)
        assert ids.tolist() == reference.encode(text).ids, repr(text)
        assert bpe.decode(ids) == text
        assert bpe.token_bytes[ids].sum() == len(text.encode())


@pytest.mark.parametrize("unit", [" ", "\n", "\t", "a", "1", "^", "é", "\n ", " ^", "'s", "\x00"])
def test_a_run_of_a_million_characters_is_encoded(
    bpe: tokenizer.Tokenizer, definition: str, unit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No repetition costs quadratic time or overflows the regex engine's stack."""
    monkeypatch.delattr(_Bpe, "_encode_hf")  # the fallback when the stack is full
    text = unit * 1_000_000
    ids = bpe.encoder()(text)
    assert bpe.token_bytes[ids].sum() == len(text.encode())
    part = text[:200_001]
    assert bpe.encoder()(part).tolist() == ids_of_huggingface(definition, part)


def test_special_tokens_in_the_text_are_text(bpe: tokenizer.Tokenizer) -> None:
    """A literal <|bos|> in a document is encoded as characters, and nothing is added."""
    ids = bpe.encoder()("a<|bos|>b")
    assert bpe.bos not in ids and bpe.decode(ids) == "a<|bos|>b"
    assert bpe.encoder()("").size == 0


def test_each_thread_gets_its_own_encoder(bpe: tokenizer.Tokenizer) -> None:
    """Encoders made and used in several threads at once agree with the main thread's."""
    texts = python_files(10)
    expected = [bpe.encoder()(text).tolist() for text in texts]
    results: dict[int, list[list[int]]] = {}

    def work(number: int) -> None:
        encode = bpe.encoder()
        results[number] = [encode(text).tolist() for text in texts]

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == dict.fromkeys(range(4), expected)


# -- properties of a tokenizer -------------------------------------------------------------------


def test_bytes_tokenizer() -> None:
    """Bytes are their own ids, <|bos|> is 256, and broken UTF-8 decodes to a replacement."""
    tokenizer = byte_tokenizer()
    text = "é\n\x00🙂<|bos|>"
    ids = tokenizer.encoder()(text)
    assert ids.dtype == np.uint16 and ids.tolist() == list(text.encode())
    assert (tokenizer.vocab_size, tokenizer.bos, tokenizer.token_bytes[256]) == (257, 256, 0)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([256, 0xC3]) == "\ufffd"


def test_token_bytes_count_raw_bytes(bpe: tokenizer.Tokenizer) -> None:
    """A token that is part of a character counts its bytes; special tokens count none."""
    ids = bpe.encoder()("\U0010ffff")
    assert len(ids) == 4 and bpe.token_bytes[ids].tolist() == [1] * 4
    assert bpe.token_bytes[bpe.bos] == 0
    assert bpe.token_bytes.dtype == np.int32 and len(bpe.token_bytes) == bpe.vocab_size
    assert bpe.decode([bpe.bos, *ids[:2]]) == "\ufffd"


def test_training_does_not_depend_on_order_or_threads(definition: str, tmp_path: Path) -> None:
    """The same texts reversed, in a process with one thread, give the same tokenizer.json."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from test_tokenizer import *; "
        "sys.stdout.write(tokenizer.train_bpe(python_files(60)[::-1], 1500))"
    )
    env = {**os.environ, "RAYON_NUM_THREADS": "1", "PYTHONHASHSEED": "5", "PYTHONUTF8": "1"}
    env["PYTHONPATH"] = os.pathsep.join(map(str, (ROOT, TESTS)))
    command = [sys.executable, "-c", code, str(Path(__file__).parent)]
    run = subprocess.run(command, env=env, capture_output=True, check=True)
    assert run.stdout.decode() == definition


def test_a_small_corpus_gives_a_smaller_vocabulary() -> None:
    """Training stops when no pair occurs twice, and the result can encode everything."""
    definition = json.loads(train_bpe(["ab ab"], 4096))
    assert len(definition["model"]["vocab"]) == 257 + len(definition["model"]["merges"]) < 265


def test_sha256_follows_the_content(
    bpe: tokenizer.Tokenizer, definition: str, tmp_path: Path
) -> None:
    """Formatting does not change the hash; another merge order does."""
    changed = json.loads(definition)
    assert load(tmp_path, json.dumps(changed)).sha256 == bpe.sha256
    changed["model"]["merges"].pop()
    assert load(tmp_path, json.dumps(changed)).sha256 != bpe.sha256


# -- given files ---------------------------------------------------------------------------------


def test_gpt2_like_file(tmp_path: Path) -> None:
    """tiktoken encodes for a file with GPT-2's pattern, also if that pattern backtracks too far."""
    definition = gpt2_like().to_str()
    tokenizer = load(tmp_path, definition)
    assert isinstance(tokenizer, _Bpe) and tokenizer._pattern is not None
    assert tokenizer.bos == tokenizer.vocab_size - 1 == 600
    encode = tokenizer.encoder()
    for text in (python_files(20)[-1], "I'll\t\t x1234\r\n\r\n  é", "x" + " " * 2_000_000 + "y"):
        assert encode(text).tolist() == ids_of_huggingface(definition, text)


@pytest.mark.parametrize("change", ["normalizer", "ignore_merges", "pattern", "merge order"])
def test_tokenizers_encodes_if_tiktoken_cannot(
    definition: str, tmp_path: Path, change: str
) -> None:
    """A file with a normalizer, odd merges or another pre-tokenizer has its right ids."""
    changed = json.loads(definition)
    if change == "normalizer":
        changed["normalizer"] = json.loads(normalizers.NFC().__getstate__())
    elif change == "ignore_merges":
        changed["model"]["ignore_merges"] = True
    elif change == "pattern":
        changed["pre_tokenizer"]["pretokenizers"][0]["behavior"] = "MergedWithNext"
    else:
        merges = changed["model"]["merges"]
        merges[0], merges[5] = merges[5], merges[0]
    tokenizer = load(tmp_path, json.dumps(changed))
    assert isinstance(tokenizer, _Bpe) and tokenizer._pattern is None
    text = python_files(3)[-1] + "e\u0301 <|endoftext|>"
    ids = tokenizer.encoder()(text)
    assert ids.tolist() == ids_of_huggingface(json.dumps(changed), text)
    assert tokenizer.bos not in tokenizer.encoder()("<|bos|>")


def test_large_vocabularies_have_wide_ids(definition: str, tmp_path: Path) -> None:
    """Ids above 65535 are uint32."""
    changed = json.loads(definition)
    changed["added_tokens"].append({**changed["added_tokens"][0], "id": 70_000, "content": "<x>"})
    tokenizer = load(tmp_path, json.dumps(changed))
    assert tokenizer.vocab_size == 70_001 and tokenizer.encoder()("a").dtype == np.uint32


def test_unusable_files_are_refused(definition: str, tmp_path: Path) -> None:
    """Each message has the file and the fix."""
    without_bos = {**json.loads(definition), "added_tokens": []}
    few_bytes = json.loads(definition)
    few_bytes["model"] |= {"vocab": {"a": 0, "<|bos|>": 1}, "merges": []}
    word_piece = Tokenizer(models.WordPiece({"a": 0, "[BOS]": 1}, unk_token="a"))
    word_piece.add_special_tokens(["[BOS]"])
    cases = {
        "not a tokenizer.json": "{",
        "not a usable": "[1, 2]",
        "no special token": json.dumps(without_bos),
        "all 256 bytes": json.dumps(few_bytes),
        "must be BPE": word_piece.to_str(),
    }
    for message, content in cases.items():
        with pytest.raises(DataError, match=message) as error:
            load(tmp_path, content)
        assert "tokenizer.json" in str(error.value) and "byte-level BPE" in str(error.value)
    with pytest.raises(DataError, match="No such file"):
        load_tokenizer(tmp_path / "absent.json")
