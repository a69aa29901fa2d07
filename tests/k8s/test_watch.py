"""`status --watch` on a real terminal and without one, and its stream of JSON."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time

import pytest
from click.testing import CliRunner
from support.api_objects import at, job, pod
from support.api_server import Log
from support.paths import ROOT

from gptddp.k8s.cli.main import cli
from gptddp.k8s.observe.frame import frame
from gptddp.k8s.observe.rank_0_log import Losses, progress, rows, sparkline

# In a session of its own: the terminal is to be the one that Ctrl-C comes from.
MAIN = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
MAIN += "from gptddp.k8s import main; main()"


def test_a_sparkline_fits_and_falls_with_the_loss():
    """As many characters as there is room or there are values; ASCII where there are no blocks."""
    assert sparkline([3.0, 2.0, 1.0], 9) == "█▅▁" and sparkline([1.0], 9) == "▁"
    assert len(sparkline(range(1000), 20)) == 20 and sparkline([], 9) == sparkline([1], 0) == ""
    assert sparkline([3.0, 2.0, 1.0], 9, unicode=False).isascii()


def test_losses_are_kept_over_the_looks_and_steps_done_again_take_their_place():
    """A run that goes back forgets what lies ahead of it."""
    losses = Losses()
    assert losses.add({1: 3.0, 2: 2.0}) == losses.add({}) == [3.0, 2.0]
    assert losses.add({2: 2.5, 3: 1.0}) == [3.0, 2.5, 1.0]
    assert losses.add({2: 2.25}) == [3.0, 2.25]


SHOWN = {
    "name": "demo",
    "state": "Running",
    "why": "",
    "checkpoint": "step-1.1",
    "replicas": {"ready": 4, "desired": 4},
    "pods": [
        {"name": f"demo-worker-{i}", "status": "Running", "restarts": 0, "age_s": 5, "node": "n"}
        for i in range(4)
    ],
}


@pytest.mark.parametrize("width", [1, 20, 40, 79, 80, 200])
def test_no_line_is_wider_than_the_terminal(said, width):
    """Nor are there more lines than it has; what is left out is counted."""
    shown = SHOWN | progress(said)
    losses = [5.0 - i / 100 for i in range(300)]
    lines = frame(shown, losses, width=width)
    assert max(map(len, lines)) <= width and len(lines) == 14
    short = frame(shown, losses, width=width, height=6)
    assert len(short) == 6 and short[-1] == "and 9 more lines"[:width]


@pytest.mark.parametrize(("state", "has"), [("Running", True), ("Failed", False)])
def test_a_job_that_does_not_run_has_no_time_left(said, state, has):
    """Nor does one that is stopped: what is left of it takes as long as nobody goes on."""
    lines = frame(SHOWN | progress(said) | {"state": state}, [], width=80)
    assert ("ETA 4 min 40 s" in "\n".join(lines)) is has


def test_what_a_pod_has_written_cannot_move_the_cursor():
    """Its escapes are shown, with colours and without."""
    line = "life 1 ended after step 9: \x1b[2Jgone"
    for colours in (False, True):
        text = "".join(frame(SHOWN | progress([line]), [], width=80, colours=colours))
        assert "\\x1b[2Jgone" in text and "\x1b[2J" not in text


@pytest.fixture
def running(api, said):
    """A job of four pods on a cluster, whose rank 0 has said all that."""
    api.put(job("Created", "Running"), *map(pod, range(4)))
    api.logs["demo-worker-0"] = Log([(at(n), line) for n, line in enumerate(said)])
    return api


@pytest.fixture
def watch(running):
    """The command on its server."""
    return ["status", "demo", "--watch", "--kubeconfig", str(running.kubeconfig)]


def test_without_a_terminal_it_is_printed_once(watch, said):
    """The numbers of `status`, no escapes; the exit code is of a question that was answered."""
    result = CliRunner().invoke(cli, watch, prog_name="gptddp-k8s")
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.stdout and "demo  Running  pods 4/4\n" in result.stdout
    step = r"^step: +120/400  \[#{9}-{21}\] 30\.0 %  ETA 4 min 40 s$"
    assert re.search(step, result.stdout, re.M)
    assert re.search(r"^loss: +2\.0000  █▅▁$", result.stdout, re.M)
    once = [it for it in watch if it != "--watch"]
    shown = CliRunner().invoke(cli, once).stdout
    for name, text in rows(progress(said)).items():
        line = rf"^{name}: +{re.escape(text)}$"
        assert not text or (re.search(line, result.stdout, re.M) and re.search(line, shown, re.M))
    assert "-o json goes on" in result.stderr


def test_as_json_it_is_a_line_a_look_until_the_end(running, watch):
    """What `status -o json` has; the exit code is that of `wait`."""
    threading.Timer(0.5, running.put, [job("Created", "Succeeded")]).start()
    result = CliRunner().invoke(cli, [*watch, "-o", "json", "--every", "0.2"])
    assert result.exit_code == 0, result.output
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert (found[0]["state"], found[-1]["state"]) == ("Running", "Succeeded")
    assert found[0]["progress"]["step"] == 120 and len(found[0]["pods"]) == 4


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, *args: str, rows: int = 30, columns: int = 90, **env: str) -> None:
        self.fd, end = pty.openpty()
        self.resize(rows, columns)
        env |= {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "TERM": "xterm"}
        command = [sys.executable, "-c", MAIN, *args]
        terminal = {"stdin": end, "stdout": end, "stderr": end}
        self.process = subprocess.Popen(command, env=env, start_new_session=True, **terminal)
        os.close(end)
        self.seen = ""

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def until(self, text: str, timeout_s: float = 30.0) -> str:
        """What it has written up to a text, which is taken off."""
        end = time.monotonic() + timeout_s
        while text not in self.seen:
            assert time.monotonic() < end, self.seen[-2000:]
            if select.select([self.fd], [], [], 0.1)[0]:
                try:
                    self.seen += os.read(self.fd, 1 << 16).decode(errors="replace")
                except OSError:  # it has ended
                    assert text in self.seen, self.seen[-2000:]
        before, _, self.seen = self.seen.partition(text)
        return before

    def end(self) -> int:
        try:
            return self.process.wait(20)
        finally:
            self.process.kill()
            os.close(self.fd)


def test_on_a_terminal_it_is_drawn_again_and_leaves_it_as_it_was(running, watch):
    """New numbers, and the end of the job: then the last frame stays, without escapes."""
    screen = Terminal(*watch, "--every", "0.3", LC_ALL="C.UTF-8")
    screen.until("\x1b[?1049h")
    assert "\x1b[1mdemo  Running" in screen.until("step:")
    screen.until("█▅▁")
    log = running.logs["demo-worker-0"]
    log.lines.append((at(59), log.lines[-2][1].replace("120/400", "130/400")))
    screen.until("130/400")
    running.put(job("Created", "Succeeded"))
    screen.until("\x1b[?25h\x1b[?1049l")
    screen.until("demo  Succeeded")
    assert "\x1b" not in screen.until("demo-worker-3")
    assert screen.end() == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_who_ends_it_has_the_terminal_back_and_the_job(watch, number, code):
    """By Ctrl-C or SIGTERM, with its own exit code. Another size is drawn before the next look;
    without colours if NO_COLOR says so, in ASCII where there is no more."""
    env = {"NO_COLOR": "1", "LC_ALL": "C", "PYTHONIOENCODING": "ascii"}
    screen = Terminal(*watch, "--every", "600", **env)
    shown = screen.until("demo-worker-3")
    assert "\x1b[1m" not in shown and "@+_" in shown and "?" not in shown.split("demo  ")[1]
    screen.resize(8, 40)
    screen.until("more lines\x1b[K")
    if number == signal.SIGINT:
        os.write(screen.fd, b"\x03")
    else:
        screen.process.send_signal(number)
    screen.until("\x1b[?1049l")
    if number == signal.SIGINT:
        screen.until("demo  Running")  # what was seen last stays
    assert screen.end() == code
