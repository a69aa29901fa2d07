"""Sample texts after evaluations, by the current model, without an effect on the run."""

import json
import time

from gptddp.inference.load_model import load
from gptddp.model.generate import generate, text_of
from gptddp.run.history import history, read_ledger
from gptddp.training import samples

FLAGS = ("--steps", "7", "--eval-every", "3", "--dropout", "0.1", "--seed", "5")
KEYS = ("step", "loss", "grad_norm", "chain_fp", "state_fp", "val_loss")


def texts(folder) -> list[dict]:
    path = folder / "samples.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_text_after_each_evaluation_changes_no_bit(run, corpus, tmp_path):
    """The last text equals a sample of its step's checkpoint; without the flag no file exists."""
    assert run(*FLAGS, "--sample-tokens", "12") == 0
    with_texts, found = list(history(tmp_path / "run")), texts(tmp_path / "run")
    assert [(it["step"], it["generation"]) for it in found] == [(3, 1), (6, 1), (7, 1)]
    (tmp_path / "run").rename(tmp_path / "sampled")
    assert run(*FLAGS) == 0
    for line, expected in zip(with_texts, history(tmp_path / "run"), strict=True):
        assert [line.get(key) for key in KEYS] == [expected.get(key) for key in KEYS]
    assert not texts(tmp_path / "run")
    net, tokenizer, step = load(tmp_path / "run", corpus)
    chances = {"temperature": 0.8, "top_k": 50, "seed": 5}
    said = "".join(text_of(tokenizer, generate(net, tokenizer, "", tokens=12, **chances)))
    assert (step, found[-1]["text"]) == (7, said)


def test_a_text_counts_as_evaluation_and_has_a_time_limit(run, tmp_path, monkeypatch):
    """The seconds of a text count as evaluation; a text that takes too long is cut off."""

    def slow(net, tokenizer, prompt, **options):
        for i in generate(net, tokenizer, prompt, **options):
            time.sleep(0.2)
            yield i

    monkeypatch.setattr(samples, "generate", slow)
    monkeypatch.setattr(samples, "MOST_S", 0.5)
    assert run("--steps", "2", "--eval-every", "1", "--sample-tokens", "4096") == 0
    stop = read_ledger(tmp_path / "run")[-1]
    assert 1.0 <= stop["phases"]["eval"][0] < 20.0
    assert len(texts(tmp_path / "run")) == 2


def test_an_unwritable_sample_does_not_stop_the_run(run, tmp_path):
    """If a folder has the name of the file, the run still does all its steps."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/samples.jsonl").mkdir()
    assert run("--steps", "2", "--eval-every", "1", "--sample-tokens", "4") == 0
