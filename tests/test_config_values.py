"""Any input to a field, by flag, TOML or config.json, gives a valid value or one clear error."""

import math
from collections.abc import Callable

import pytest
import torch
from click.testing import CliRunner
from support import ledgers
from support.toy import SMALL

from gptddp import train
from gptddp.advice import advice
from gptddp.cli import cli
from gptddp.config import FIELDS, Config, with_preset
from gptddp.errors import ConfigError
from gptddp.flags import flag, from_args, from_saved
from gptddp.k8s.render import rules, spec
from gptddp.model.gpt import check_size
from gptddp.run.history import read_ledger
from gptddp.training import entry

LONG = "9" * 5000
TEXTS = [
    *("", "x", "true", "None", "[1,2]", "a,b", "nan,0.9", "0.9,", "0.9,0.9,0.9", "0.9,1", "a\0b"),
    *("nan", "inf", "-inf", "-1", "-0.1", "1e999", "1.5", "2e9", str(2**80), "-" + LONG, LONG),
]
TOML = [
    *('""', '"x"', '"1"', '"a\\u0000b"', "true", "[]", "[1]", "[0.1, 0.2, 0.3]", '["a", "b"]'),
    *("[true, false]", "[nan, 0.9]", "[0.9, 1e999]", "[[1], [2]]", "{a = 1}", "1979-05-27"),
    *("nan", "inf", "-inf", "-1", "-0.1", "1e999", "2e9", str(2**80), LONG, "0x" + "f" * 5000),
]
JSON = [
    *(True, "", "x", "1", "a\0b", "\ud800", [], [1], ["a", "b"], [None, 0.9], [True, 0.9], {}),
    *(math.nan, math.inf, -1, -0.1, 2**80, 10**400, [10**400, 0.9], [math.nan, 0.9], {"a": 1}),
]


def given(name: str, make: Callable[[], Config]) -> None:
    """Assert that `make` gives a valid value, or a short ConfigError that names the field."""
    try:
        value = getattr(make(), name)
    except ConfigError as error:
        text = str(error).replace(flag(name), name)
        assert name in text and len(text) < 600
        return
    numbers = value if isinstance(value, tuple) else [value]
    assert isinstance(value, str | bool) or all(
        x >= 0 and (math.isfinite(x) if type(x) is float else type(x) is int and x < 2**64)
        for x in numbers
    ), f"{name} is {value!r}"


@pytest.mark.parametrize("name", FIELDS)
def test_no_value_gives_a_traceback(tmp_path, name):
    """Text, NaN, infinite or huge numbers, lists, tables and null characters give no traceback."""
    for text in TEXTS:
        given(name, lambda text=text: from_args([f"{flag(name)}={text}"]))
    path = tmp_path / f"{name}.toml"
    for text in TOML:
        path.write_text(f"[train]\n{name} = {text}\n")
        given(name, lambda: from_args(["--config", str(path)]))
    for value in JSON:
        given(name, lambda value=value: from_saved("run/config.json", {name: value}))
    assert from_saved("run/config.json", {name: None}) == from_saved("run/config.json", {})


def test_a_wrong_value_in_a_run_is_exit_code_2_for_every_command(run, tmp_path, capfd):
    """A ledger edited by hand gives an error with file and field, and no traceback."""
    assert run("--steps", "1") == 0
    folder = tmp_path / "run"
    start, *events = read_ledger(folder)
    ledgers.write(folder, [start | {"config": start["config"] | {"betas": ["a", "b"]}}, *events])
    wanted = f"{folder / 'ledger.jsonl'} cannot be used (betas is ['a', 'b']"
    assert run("--steps", "2") == 2
    err = capfd.readouterr().err
    assert wanted in err and "Traceback" not in err
    for command in (["sample", folder], ["checkpoints", folder, "--export", folder / "out"]):
        result = CliRunner().invoke(cli, list(map(str, command)))
        assert result.exit_code == 2 and wanted in result.output


LONG_ROW = ("--seq-len", str(2**20), "--positions", "rope", "--lanes", "1", "--batch", "1")


TOO_LARGE = [
    (("--n-embd", str(2**18)), ["n_embd 262144", "lower one of them"]),
    (("--depth", "64", "--n-embd", str(2**18)), ["n_layer", "lower --depth"]),
    ((*LONG_ROW, "--windows", "SL"), ["seq_len 1048576", "--windows L --mask none"]),
    ((*LONG_ROW, "--mask", "document"), ["seq_len 1048576", "--windows L --mask none"]),
]


def test_a_model_or_mask_larger_than_memory_is_refused(run, capfd):
    """A model, or the mask of a long row, is refused before its allocation fails. The error has its
    size, the memory and the fix."""
    for flags, words in TOO_LARGE:
        assert run("--steps", "1", *flags) == 2
        err = capfd.readouterr().err
        assert all(word in err for word in words) and "GiB" in err and "Traceback" not in err
    assert run("--steps", "1") == 0  # the refused runs had not begun
    config = with_preset(Config(preset="gpt2"), accelerator=False)
    check_size(config, 50257, torch.device("cpu"))


# -- allowed, but seldom intended ----------------------------------------------------------------


def closed(**fields: int) -> Config:
    return with_preset(Config(**fields), accelerator=True)


@pytest.mark.parametrize(
    ("workers", "says"),
    [
        (32, ["25.0%", "24 are as fast, and 48 are faster", "a multiple of 32"]),
        (7, ["2.0%", "some have 7", "8 are faster"]),
    ],
)
def test_advice_on_lanes_that_do_not_divide_evenly(workers, says):
    """The advice has the idle part of the workers' time, however small, and better numbers."""
    (line,) = advice(closed(), workers)
    assert all(text in line for text in says) and "48 lanes" in line


def test_suggested_numbers_of_workers_are_better():
    """For any lanes and workers, the smaller suggestion is as fast, and the larger is faster."""
    for lanes in range(1, 60):
        config = closed(lanes=lanes, batch=lanes)
        for workers in range(1, lanes + 1):
            most = -(-lanes // workers)
            lines = advice(config, workers)
            assert bool(lines) == (lanes % workers > 0)
            if lines:
                better = lines[0].split("; ")[1]
                *fewer, more = (int(word) for word in better.split() if word.isdigit())
                assert workers < more <= lanes and -(-lanes // more) < most
                assert (not fewer) == (-(-lanes // (workers - 1)) > most)
                assert all(n < workers and -(-lanes // n) == most for n in fewer)


def test_advice_on_a_warm_up_longer_than_the_run():
    """The advice says where the learning rate ends, and names both fixes."""
    (line,) = advice(closed(steps=3, warmup_steps=1000, lr=1), 1)
    assert "warmup_steps 1000 is more than steps 3" in line and "ends at 3.0e-03" in line
    assert "--warmup-steps of at most 3" in line and not advice(closed(steps=3, warmup_steps=3), 1)
    full = closed().batch * closed().seq_len
    (line,) = advice(closed(steps=999, warmup_steps=6, max_tokens=4 * full + 1), 1)
    assert f"warmup_steps 6 is more than the 5 full steps of max_tokens {4 * full + 1}: " in line
    assert line.endswith("use a --warmup-steps of at most 5, or more --max-tokens")
    assert not advice(closed(steps=999, warmup_steps=6, max_tokens=5 * full + 1), 1)


def test_a_job_gets_its_advice_before_it_is_submitted():
    """The notes of `render` and `submit` have the advice, for all workers of the job."""
    job = spec.load(
        None, {"replicas": 16, "nproc_per_node": 2, "image": "a:1"}, ["--preset", "gpt2"]
    )
    (note,) = rules.warnings(job)
    assert "32 workers share 48 lanes" in note


def test_the_advice_is_logged_once(corpus, tmp_path, train_here, caplog, monkeypatch):
    """The trainer logs its advice once, at the beginning of a life."""
    asked = []
    monkeypatch.setattr(entry, "advice", lambda c, world: asked.append(world) or ["too many"])
    places = ["--data", str(corpus), "--run-dir", str(tmp_path / "run"), "--steps", "1"]
    assert train.main([*SMALL, *places]) == 0
    assert asked == [1] and caplog.text.count("too many") == 1
