"""Sampling: the cache and streaming do not change the text."""

import contextlib
import os
import signal
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from gptddp.cli import cli
from gptddp.config import Config, with_preset
from gptddp.data.tokenizer import byte_tokenizer, load_tokenizer, train_bpe
from gptddp.model import gpt
from gptddp.model.generate import generate, text_of

CPU = torch.device("cpu")
PLAIN = {"tokens": 24, "temperature": 1.0, "top_k": 0, "seed": 3}
ODD = "naïve 漢字 🙂‍🔥 e\u0301 Ж"


NETS = [("tiny", "fused"), ("tiny", "blocks"), ("modern-tiny", "blocks"), ("autoresearch", "fused")]


@pytest.fixture(scope="module", params=NETS, ids="-".join)
def net(request):
    """A model of 16 positions with large weights, so that each token matters."""
    preset, attention = request.param
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 32, "seq_len": 16, "precision": "fp32"}
    shape |= {"preset": preset, "attention": attention}
    shape |= {"kv_heads": 1 if preset == "modern-tiny" else None}
    made = gpt.build(with_preset(Config(**shape), accelerator=False), 257, CPU).eval()
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0, 0.5, generator=random)
    return made


@pytest.mark.parametrize(
    "prompt", ["", "the quick", "the quick brown", "the quick brown fox jumps"]
)
def test_each_token_is_the_likeliest_after_the_tokens_of_a_row(net, prompt):
    """Each token is the likeliest one, without a cache, after BOS and the text so far, cut to the
    newest seq_len tokens; also after a prompt that is longer."""
    ids = [256, *prompt.encode()]
    for made in generate(net, byte_tokenizer(), prompt, **PLAIN | {"temperature": 0.0}):
        with torch.no_grad():
            logits = net(torch.tensor([ids[-16:]]))[0, -1, :257]
        assert made == logits.argmax()
        ids.append(made)
    assert len(ids) > 20


def test_the_seed_decides_the_text(net):
    """The same seed gives the same text, another seed another text."""
    found = [
        list(generate(net, byte_tokenizer(), "the", **PLAIN | {"seed": seed})) for seed in (3, 3, 4)
    ]
    assert found[0] == found[1] != found[2]


def test_the_cache_is_used(net, monkeypatch):
    """Within seq_len each token except the first is computed alone."""
    seen = []
    hidden = net.hidden
    monkeypatch.setattr(
        net, "hidden", lambda x, **kwargs: (seen.append(x.shape[1]), hidden(x, **kwargs))[1]
    )
    list(generate(net, byte_tokenizer(), "abc", **PLAIN | {"tokens": 16}))
    assert len(seen) > 5 and seen == [4, *[1] * 12, *[16] * 3][: len(seen)]  # a text may end before


class _Logits:
    """A model whose next token always has these logits."""

    def __init__(self, chances: list[float]) -> None:
        self.seq_len, self.blocks = 1, [None]
        self.logs = torch.tensor(chances).log()

    def parameters(self):
        return iter([self.logs])

    def hidden(self, x, cache=None):
        return torch.ones(*x.shape, 1)

    def logits(self, h):
        return self.logs


def drawn(chances: list[float], **options) -> np.ndarray:
    """The frequency of each of the bytes 0, 1, ... in 400 tokens."""
    chances = chances + [1e-30] * (257 - len(chances))
    ids = generate(_Logits(chances), byte_tokenizer(), "", **PLAIN | {"tokens": 400} | options)
    return np.bincount(list(ids), minlength=257)[: len(chances)] / 400


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    """The kept tokens keep their proportions. The token with which the total passes p is the last.
    top_p is applied after temperature and top_k."""
    chances = [0.5, 0.25, 0.15, 0.1]
    for top_p, kept in ((0.4, 1), (0.55, 2), (0.76, 3), (0.95, 4), (1e-9, 1)):
        found = drawn(chances, top_p=top_p)
        expected = np.array(chances[:kept]) / sum(chances[:kept])
        assert np.count_nonzero(found) == kept, top_p
        assert np.allclose(found[:kept], expected, atol=0.06), top_p
    assert np.count_nonzero(drawn(chances, top_p=0.8, temperature=0.5)) == 2
    assert np.count_nonzero(drawn(chances, top_p=0.7, top_k=2)) == 2
    assert np.count_nonzero(drawn(chances, top_p=0.6, top_k=2)) == 1


@pytest.mark.parametrize(
    "options",
    [{"top_p": 1e-300}, {"temperature": 1e-39}, {"temperature": 5e-324, "top_p": 0.5}],
)
def test_options_too_small_for_a_float_take_the_likeliest(options):
    """No intermediate number becomes 0 or infinite."""
    assert drawn([0.2, 0.5, 0.3], **options)[1] == 1


def test_top_k_and_tokens_may_have_any_size(net):
    """A top_k beyond the vocabulary means all tokens; 0 tokens give no text."""
    plain, more = (
        list(generate(net, byte_tokenizer(), "ab", **PLAIN | {"top_k": it})) for it in (0, 2**70)
    )
    assert plain == more and plain
    assert not list(generate(net, byte_tokenizer(), "ab", **PLAIN | {"tokens": 0}))


def test_a_character_is_streamed_when_it_is_complete(tmp_path):
    """One piece per token, without replacement characters; joined, they are the text. A text that
    ends within a character ends as in `decode`."""
    (tmp_path / "tokenizer.json").write_text(train_bpe(["abc " * 9], 260))
    for tokenizer in (byte_tokenizer(), load_tokenizer(tmp_path / "tokenizer.json")):
        ids = tokenizer.encoder()(ODD).tolist()
        pieces = list(text_of(tokenizer, iter(ids)))
        assert "".join(pieces) == ODD and len(pieces) == len(ids) + 1
        broken = [*ids[:9], tokenizer.bos, *ids[:9]]
        assert "".join(text_of(tokenizer, broken)) == tokenizer.decode(broken)
        assert "\ufffd" in tokenizer.decode(broken)


# -- the command -----------------------------------------------------------------------------------

# A model that makes a token for each line on its stdin.
SLOW = """
import os, sys
for fd, path in enumerate(sys.argv[1:]):
    os.dup2(os.open(path, os.O_WRONLY if fd else os.O_RDONLY), fd)
from gptddp.cli import cli
from gptddp.data.tokenizer import byte_tokenizer
from gptddp.inference import load_model
from gptddp.model import generate as model

def generate(*_args, **_options):
    for i in "é".encode() * 1000:
        sys.stdin.readline()
        yield i

load_model.load = lambda *_: (None, byte_tokenizer(), 7)
model.generate = generate
sys.argv = ["gptddp", "sample", "run", "--prompt", "p"]
cli()
"""
SAID = b"[0.0 s] loading torch\nstep 7, seed 0\n"


@pytest.fixture
def slow(forked, tmp_path):
    """`gptddp sample` with the model of SLOW, and pipes."""
    modes = {"stdin": "wb", "stdout": "rb", "stderr": "rb"}
    paths = {name: tmp_path / name for name in modes}
    for path in paths.values():
        os.mkfifo(path)
    process = forked(SLOW, *map(str, paths.values()))
    with contextlib.ExitStack() as stack:
        opened = {it: stack.enter_context(paths[it].open(modes[it], 0)) for it in modes}
        assert opened["stdout"].read(1) == b"p"
        yield SimpleNamespace(process=process, **opened)


def test_tokens_are_printed_at_once_and_ctrl_c_ends_them_quietly(slow):
    """Each character is in the pipe before the next token is requested. After Ctrl-C the exit code
    is 130, and stderr has only loading, step and seed."""
    for _ in range(3):
        slow.stdin.write(b"\n\n")
        assert os.read(slow.stdout.fileno(), 9) == "é".encode()
    slow.process.send_signal(signal.SIGINT)
    assert slow.process.wait(20) == 130
    assert slow.stderr.read() == SAID and slow.stdout.read() == b""


def test_a_reader_that_closes_the_pipe_is_no_error(slow):
    """If the reader ends, as in `| head`, there is no traceback and no message."""
    slow.stdout.close()
    slow.stdin.write(b"\n" * 8)
    assert slow.process.wait(20) == 1
    assert slow.stderr.read() == SAID


def test_a_full_disk_behind_stdout_is_reported(forked):
    """A full disk gives one line and exit code 1, without a traceback."""
    process = forked(SLOW, "/dev/null", "/dev/full")
    assert process.wait(120) == 1
    *_, error = process.stderr.read().splitlines()
    assert error == "Error: [Errno 28] No space left on device: make room there first"


@pytest.mark.parametrize(
    ("flag", "value"),
    [("tokens", "-1"), ("seed", str(2**64)), ("seed", str(-(2**63) - 1)), ("prompt", "a\udcff")]
    + [("top-p", "0.0"), ("top-p", "1.1"), ("top-p", "nan"), ("top-k", "-1")]
    + [("temperature", "-0.1"), ("temperature", "nan"), ("temperature", "inf")],
)
def test_an_invalid_option_is_refused_first(tmp_path, flag, value):
    """The message has the flag; nothing has been read or printed before."""
    result = CliRunner().invoke(cli, ["sample", str(tmp_path), f"--{flag}={value}"])
    assert result.exit_code == 2 and result.stdout == ""
    assert f"--{flag}" in result.stderr and "ledger" not in result.stderr
