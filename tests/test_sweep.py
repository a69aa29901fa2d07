"""`gptddp sweep`: many runs by one command, also if it is stopped or killed."""

import contextlib
import os
import signal
import subprocess
import sys

import pytest
from click.testing import CliRunner
from support.processes import alive, children
from support.toy import SMALL
from support.waiting import until

from gptddp import grid
from gptddp.cli import cli
from gptddp.config import Config
from gptddp.errors import ConfigError
from gptddp.fingerprints import compare
from gptddp.run.history import last_step


@pytest.fixture
def given(corpus, tmp_path):
    """given(rates, *flags): the arguments of a sweep in tmp_path / "lr" over learning rates."""

    def words(rates, *flags):
        common = ["--", *SMALL, "--data", str(corpus), "--steps", "100", "--max-skipped", "1"]
        return ["sweep", "--run-dir", str(tmp_path / "lr"), "--lr", rates, *common, *flags]

    return words


@pytest.fixture
def begin(spawn, given):
    """begin(rates, *flags): start a sweep in a separate process."""
    program = [sys.executable, "-c", "from gptddp.cli import cli; cli()"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return lambda rates, *flags: spawn([*program, *given(rates, *flags)], **pipes)


@pytest.fixture
def here(given, train_here):
    """here(rates, *flags): the result of a sweep in this process, for one that trains nothing."""
    return lambda rates, *flags: CliRunner().invoke(cli, given(rates, *flags))


def test_a_stopped_sweep_continues_to_the_result_of_an_undisturbed_one(begin, here, run, tmp_path):
    """A stopped and repeated sweep has the bits and the table of undisturbed runs. A run that fails
    stops no other, and sets the exit code. Finished runs are not trained again."""
    stopped = tmp_path / "lr/lr-3e-3"
    first = begin("3e-3,1e-2")
    until(lambda: last_step(stopped) > 0, why=lambda: first.poll())
    first.send_signal(signal.SIGINT)
    _, err = first.communicate(timeout=60)
    assert first.returncode == 130 and "stopped at lr-3e-3" in err and "Aborted" not in err
    assert 0 < last_step(stopped) < 100, "the run was not stopped in the middle"

    again = begin("1e30,3e-3")
    table, err = again.communicate(timeout=120)
    assert again.returncode == 1, err
    assert "lr-1e30 failed with exit code 3" in err and "life 2: from step-" in err
    heads, best, other = (line.split() for line in table.splitlines()[:3])
    assert "lr" in heads and "lr-3e-3" in best and "lr-1e30" in other
    by_hand = tmp_path / "by-hand"
    assert run("--steps", "100", "--lr", "0.003", "--run-dir", str(by_hand)) == 0
    assert compare(stopped, by_hand).difference is None and last_step(stopped) == 100

    third = here("3e-3")
    assert third.exit_code == 0 and third.stdout == table
    assert "all 100 steps are done" in third.stderr and "life" not in third.stderr
    for flags, told in (
        (("--seed", "3"), "seed: 1337 -> 3"),
        (("--weight-decay", "0.2"), "no step remains for weight_decay: 0.1 -> 0.2"),
    ):
        refused = here("1e-2,3e-3", *flags)
        assert refused.exit_code == 2 and told in refused.stderr
        assert "or give another --run-dir" in refused.stderr
    assert not (tmp_path / "lr/lr-1e-2").exists()


def test_no_training_outlives_a_sweep_that_is_killed(begin):
    """If a sweep is killed, the kernel stops its training."""
    sweep = begin("3e-3,1e-2", "--steps", "1000000")
    (training,) = until(lambda: children(sweep.pid))
    sweep.kill()
    try:
        until(lambda: not alive(training), timeout_s=30)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(training, signal.SIGKILL)


@pytest.mark.parametrize(
    ("rates", "flags", "told"),
    [
        ("1e-3,3e-3,1x", [], "--lr is '1x': it must be a number, as in 0.003"),
        ("1e-3,3e-3,-1", [], "lr is -1.0: it must be at least 0"),
        ("1e-3,", [], "--lr is '': it must be a number, as in 0.003"),
        ("1e-3,3e-3", ["--lr=1e-2"], "--lr is given before and after --"),
        ("1e-3,3e-3", ["--run-dir", "x"], "give it once, before --"),
        ("1e-3,3e-3", ["--data", "nothing"], "nothing: no such folder"),
        ("1e-3,3e-3", ["--data", ""], "--data is missing: give it after --"),
        ("1e-3,3e-3", ["--stepz", "3"], "did you mean '--steps'"),
        ("1e-3,3e-3", ["--track", "wandb"], "the package wandb is not installed: pip install"),
    ],
)
def test_a_mistake_is_refused_before_the_first_run(here, tmp_path, rates, flags, told):
    """A mistake, even in the last value, gives exit code 2, and nothing is made."""
    result = here(rates, *flags)
    assert result.exit_code == 2 and told in result.stderr, result.stderr
    assert not (tmp_path / "lr").exists()


def test_a_value_that_does_not_fit_the_preset_is_refused_before_the_first_run(corpus, tmp_path):
    """The check of a value against the preset needs no torch, which takes seconds to load."""
    words = ["sweep", "--run-dir", str(tmp_path / "heads"), "--n-head", "4,3"]
    result = CliRunner().invoke(cli, [*words, "--", "--data", str(corpus), "--preset", "tiny"])
    assert result.exit_code == 2 and "n_embd 128 is not divisible by n_head 3" in result.stderr
    assert not (tmp_path / "heads").exists()


def test_a_field_that_is_given_twice_is_refused(tmp_path):
    """A repeated field is refused, as its first values would be ignored silently."""
    words = ["sweep", "--run-dir", str(tmp_path / "lr"), "--lr", "1e-3,3e-3", "--lr=1e-2"]
    result = CliRunner().invoke(cli, [*words, "--", "--steps", "9"])
    assert result.exit_code == 2 and "a field is given twice" in result.stderr


def test_an_unwritable_folder_is_refused_before_the_first_run(here, tmp_path, monkeypatch):
    """The error names the folder in which the sweep's own folder would be made."""
    monkeypatch.setattr(
        os, "access", lambda path, mode: path != tmp_path
    )  # root may write anywhere
    result = here("1e-3")
    assert result.exit_code == 2 and f"{tmp_path} is not writable" in result.stderr


@pytest.mark.parametrize("name", ["data", "run_dir", "metrics_port", "init_sha256", "betas"])
def test_fields_of_a_start_cannot_be_swept(name):
    """Paths and ports make no runs to compare. The error names the flag and the fix."""
    with pytest.raises(ConfigError, match=f"--{name}".replace("_", "-") + ".*after --"):
        grid.configurations({name: "1,2"}, Config(), [])


def test_several_fields_give_every_combination():
    """Runs are in the order of the command, fields of a name in that of the configuration."""
    swept = {"seed": "1,2", "lr": "1e-3,0.0012", "windows": "SL"}
    runs = grid.configurations(swept, Config(steps=9), [])
    values = [(it.seed, it.lr, it.windows, it.steps) for it in runs.values()]
    assert values == [(seed, lr, "SL", 9) for seed in (1, 2) for lr in (0.001, 0.0012)]
    assert list(runs)[:2] == ["windows-sl-lr-1e-3-seed-1", "windows-sl-lr-12e-4-seed-1"]


@pytest.mark.parametrize(
    ("same", "name"),
    [
        (("3e-3", "0.003", ".30e-2"), "lr-3e-3"),
        (("0.1", "1e-1"), "lr-1e-1"),
        (("0.00123456789",), "lr-123456789e-11"),
        (("0", "0.0"), "lr-0"),
        (("60", "6e1"), "lr-60"),
        (("1e30",), "lr-1e30"),
    ],
)
def test_a_number_has_one_name_however_it_is_written(same, name):
    """A name has only lower case letters, digits and '-', which folders and jobs allow."""
    assert list(grid.configurations({"lr": ",".join(same)}, Config(), [])) == [name]
