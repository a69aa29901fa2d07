"""The progress that a training shows, on a real terminal and without one."""

import os
import re
import select
import signal
import sys
import time

import pytest
from click.testing import CliRunner
from support.paths import ROOT
from support.terminal import BEGIN, GPTDDP, Terminal, drawn
from support.toy import SMALL

from gptddp import live
from gptddp.cli import cli

PHASES = ("loading torch", "opening the dataset", "building the model", "the first step")


@pytest.fixture
def train(corpus, tmp_path):
    """The arguments of `gptddp train`, without the number of steps."""
    return ["train", *SMALL, "--data", str(corpus), "--run-dir", str(tmp_path / "run")]


def test_parts_that_do_not_fit_are_left_out():
    """As many parts as fit are shown, the most important first; only the first may be cut."""
    parts = ["step 3/100", "loss 5.21", "ETA 1:02:05"]
    assert live.fit(parts, 40) == "step 3/100  loss 5.21  ETA 1:02:05"
    assert live.fit(parts, 33) == "step 3/100  loss 5.21"
    assert live.fit(parts, 6) == "step 3" and live.fit([], 6) == ""


def test_a_terminal_shows_progress_from_the_first_second(train):
    """Phases and then steps are drawn on one line that fits, also when the terminal gets narrower.
    The cursor stays visible, and at the end the drawn line is removed."""
    began = time.monotonic()
    screen = Terminal(GPTDDP, *train, "--steps", "100000", columns=80)
    said = screen.until(r"\x1b\[\?25l\x1b\[\?25h") + screen.until(PHASES[0])
    assert time.monotonic() - began < 5.0  # it takes 0.5 s
    said += "".join(map(screen.until, PHASES[1:]))
    said += screen.until(r"step \d+/100000  loss \S+  ETA [\w ]+  \S+ k tok/s")
    assert all(len(it) < 80 for it in drawn(said))
    screen.resize(30, 40)
    time.sleep(1.1)
    screen.until(r"\r\x1b\[2Kstep ")
    said = screen.until(r"\r\x1b\[2Kstep \d\d")
    assert all(len(it) < 40 for it in drawn(said))
    os.write(screen.fd, b"\x03")
    screen.until(r"stopped after step")
    screen.until(r"\x1b\[\?25h\r\x1b\[1A\x1b\[2K")  # the line is gone
    assert (screen.seen, screen.end()) == ("", 130)


def test_a_process_that_is_killed_early_removes_its_line(train):
    """A signal before the first step ends the process without clean-up; the drawn line is removed
    all the same."""
    screen = Terminal(GPTDDP, *train, "--steps", "100000")
    screen.until("building the model")
    screen.process.send_signal(signal.SIGTERM)
    assert screen.process.wait(20) == 143
    while select.select([screen.fd], [], [], 0.1)[0]:
        try:
            screen.seen += os.read(screen.fd, 1 << 16).decode()
        except OSError:
            break
    assert screen.seen.endswith("\r\x1b[2K") and screen.end() == 143


def test_without_a_terminal_there_are_plain_lines(run, capsys, caplog):
    """Each phase, with its time, and each logged step is one line without escapes."""
    caplog.set_level("INFO")
    assert run("--steps", "20") == 0
    said = capsys.readouterr().err
    assert "\x1b" not in said
    for phase in (*PHASES[1:], "evaluating", "saving the last checkpoint"):
        assert len(re.findall(rf"^\[\d+\.\d s\] {phase}$", said, re.M)) == 1, said
    assert re.search(r"step 10/20  loss .*  ETA \d+ s", caplog.text)


@pytest.mark.parametrize(("term", "draws"), [("xterm", True), ("dumb", False)])
def test_a_terminal_that_cannot_draw_has_plain_lines(monkeypatch, term, draws):
    """On a dumb terminal, as in an editor's shell, phases are lines with times and no escapes."""
    monkeypatch.setenv("TERM", term)
    fd, end = os.openpty()
    with open(end, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        with live.shown() as screen:
            live.phase("loading torch")
            assert live.screen() is screen and screen.draws is draws
        said = os.read(fd, 4096).decode()
    os.close(fd)
    assert ("\x1b" in said) is draws and (said == "[0.0 s] loading torch\r\n") is not draws


def test_ctrl_c_ends_a_process_that_loads_torch_at_once(train, tmp_path):
    """Ctrl-C ends the process even if an import swallows it, as NumPy's within torch may."""
    (tmp_path / "torch.py").write_text("try: import time; time.sleep(30)\nexcept BaseException: 1")
    screen = Terminal(GPTDDP, *train, PYTHONPATH=f"{tmp_path}:{ROOT}")
    screen.until("loading torch 1 s")
    os.write(screen.fd, b"\x03")
    said = screen.until(r"\^C\r\x1b\[2K$")
    assert "Traceback" not in said and screen.end() == 130


def test_in_the_background_of_a_shell_nothing_is_drawn():
    """A background process draws nothing, as the terminal's last line is the shell's prompt."""
    code = "from gptddp import live\nwith live.shown(): live.phase('loading torch')"
    group = "import os\nif pid := os.fork():\n os.waitpid(pid, 0)\n os._exit(0)\nos.setpgid(0, 0)\n"
    screen = Terminal(BEGIN + group + code)
    said = screen.until(r"loading torch\r\n")
    assert said == "[0.0 s] " and screen.end() == 0


def test_a_closed_pipe_does_not_end_a_training(monkeypatch):
    """After the reader of the output is gone, writing to it raises nothing."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        screen = live.Screen()
        screen.write("nobody hears it\n")
        screen.phase("nor this")


@pytest.mark.parametrize(
    "command", [["sample", "{}"], ["eval", "{}", "{}"], ["audit", "{}"]]
    + [["checkpoints", "{}", "--export", "{}/model"]]
)  # fmt: skip
def test_commands_that_load_torch_say_so_first(tmp_path, command):
    """Torch takes seconds to load, so each of these commands first prints `loading torch`."""
    (tmp_path / "ledger.jsonl").touch()
    args = [it.format(tmp_path) for it in command]
    result = CliRunner().invoke(cli, args)
    assert result.stderr.startswith("[0.0 s] loading torch\n")


@pytest.mark.parametrize(
    "command", [["report", "{}"], ["runs", "{}"], ["checkpoints", "{}"]]
    + [["fingerprints", "{}", "{}"]]
)  # fmt: skip
def test_a_terminal_shows_that_a_command_reads_runs(tmp_path, command):
    """Logs and checkpoints may be large: the command is not silent while it reads them."""
    (tmp_path / "ledger.jsonl").touch()
    screen = Terminal(GPTDDP, *(it.format(tmp_path) for it in command))
    screen.until(r"reading [\w ]+ 0 s\r")
    screen.end()


def test_reading_needs_no_rank(tmp_path, monkeypatch):
    """A shell in the pod of a job with a Master has RANK, but not the other variables of a rank."""
    (tmp_path / "ledger.jsonl").touch()
    monkeypatch.setenv("RANK", "0")
    result = CliRunner().invoke(cli, ["checkpoints", str(tmp_path)])
    assert (result.exit_code, result.stderr) == (4, f"{tmp_path} has no checkpoints\n")


def test_a_closed_output_does_not_end_a_training(train):
    """A training succeeds without stdout and stderr, as after `>&- 2>&-`."""
    closing = "import os, sys; os.execv('/bin/sh', ['sh', '-c', *sys.argv[1:]])"
    screen = Terminal(
        closing,
        'exec "$@" >&- 2>&-',
        "sh",
        sys.executable,
        "-m",
        "gptddp",
        *train,
        "--steps",
        "2",
    )
    assert screen.process.wait(60) == 0 == screen.end()
