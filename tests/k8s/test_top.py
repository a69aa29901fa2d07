"""`top` on a real terminal and without one, of a cluster's job and of one on this machine."""

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
import time

import pytest
from click.testing import CliRunner
from support.api_objects import at, job, pod
from support.api_server import Log
from support.local_jobs import job as local_job
from support.paths import ROOT
from support.rank_0_lines import of_a_life

from gptddp.config import Config
from gptddp.k8s.cli.main import cli
from gptddp.k8s.local import conditions, locks
from gptddp.k8s.local.screen import StepFeed, told
from gptddp.k8s.observe.progress import Losses, progress, rows, sparkline
from gptddp.k8s.observe.top import frame
from gptddp.k8s.render import manifest

# In a session of its own: the terminal is to be the one that Ctrl-C comes from.
MAIN = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
MAIN += "from gptddp.k8s import main; main()"


@pytest.fixture(scope="module")
def said():
    """The lines of rank 0, by the code that writes them: what `top` reads is what it writes."""
    return of_a_life()


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
    assert ("ETA 4:40" in "\n".join(lines)) is has


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


def test_without_a_terminal_it_is_printed_once(running):
    """The numbers of `status`, no escapes; the exit code is of a question that was answered."""
    named = ["--kubeconfig", str(running.kubeconfig)]
    result = CliRunner().invoke(cli, ["top", "demo", *named], prog_name="gptddp-k8s")
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.stdout and "demo  Running  pods 4/4\n" in result.stdout
    assert re.search(r"^step: +120/400  \[#{9}-{21}\] 30%  ETA 4:40$", result.stdout, re.M)
    assert re.search(r"^loss: +2\.0000  █▅▁$", result.stdout, re.M)
    for name in ("goodput", "slow", "stalled", "last fault"):
        text = rows(progress(running_lines(running)))[name]
        assert re.search(rf"^{name}: +{re.escape(text)}$", result.stdout, re.M)
        shown = CliRunner().invoke(cli, ["status", "demo", *named]).stdout
        assert re.search(rf"^{name}: +{re.escape(text)}$", shown, re.M)
    result = CliRunner().invoke(cli, ["top", "dem", *named])
    assert result.exit_code == 102 and "there are demo" in result.stderr


def running_lines(api) -> list[str]:
    return [text for _, text in api.logs["demo-worker-0"].lines]


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


def test_on_a_terminal_it_is_drawn_again_and_leaves_it_as_it_was(running):
    """New numbers, and the end of the job: then the last frame stays, without escapes."""
    named = ["--kubeconfig", str(running.kubeconfig), "--every", "0.3"]
    top = Terminal("top", "demo", *named, LC_ALL="C.UTF-8")
    top.until("\x1b[?1049h")
    assert "\x1b[1mdemo  Running" in top.until("step:")
    top.until("█▅▁")
    log = running.logs["demo-worker-0"]
    log.lines.append((at(59), log.lines[-2][1].replace("120/400", "130/400")))
    top.until("130/400")
    running.put(job("Created", "Succeeded"))
    top.until("\x1b[?25h\x1b[?1049l")
    top.until("demo  Succeeded")
    assert "\x1b" not in top.until("demo-worker-3")
    assert top.end() == 0


def test_ctrl_c_leaves_the_terminal_and_the_job(running):
    """Exit code 130; without colours if NO_COLOR says so, in ASCII where there is no more."""
    named = ["--kubeconfig", str(running.kubeconfig)]
    env = {"NO_COLOR": "1", "LC_ALL": "C", "PYTHONIOENCODING": "ascii"}
    top = Terminal("top", "demo", *named, **env)
    shown = top.until("demo-worker-3")
    assert "\x1b[1m" not in shown and "@+_" in shown and "?" not in shown.split("demo  ")[1]
    os.write(top.fd, b"\x03")
    top.until("\x1b[?1049l")
    top.until("demo-worker-3")  # what was seen last stays
    assert top.end() == 130


def test_another_size_is_drawn_at_once_and_sigterm_leaves_the_terminal_as_it_was(running):
    """Long before the next look; as with Ctrl-C, with its own exit code."""
    top = Terminal("top", "demo", "--kubeconfig", str(running.kubeconfig), "--every", "600")
    top.until("demo-worker-3")
    top.resize(8, 40)
    top.until("more lines\x1b[K")
    top.process.send_signal(signal.SIGTERM)
    top.until("\x1b[?1049l")
    assert top.end() == 143


@pytest.fixture
def here(tmp_path, said):
    """A --local-dir with a job that this process seems to run, of two pods."""
    folder = tmp_path / "jobs/job"
    (folder / "logs").mkdir(parents=True)
    (folder / "manifest.yaml").write_text(manifest.to_yaml([local_job()]))
    (folder / "logs/job-worker-0.log").write_text("\n".join(said) + "\n")
    made = conditions.Conditions()
    made.set("Created", "x", "x"), made.set("Running", "x", "x")
    pods = {
        "job-worker-0": {"phase": "Running", "pid": os.getpid(), "restarts": 0, "exitCode": None},
        "job-worker-1": {"phase": "Pending", "pid": None, "restarts": 2, "exitCode": 137},
    }
    told = {"name": "job", "startTime": conditions.now(), "conditions": made.items, "pods": pods}
    (folder / "status.json").write_text(json.dumps(told))
    fd = locks.lock(folder)
    yield tmp_path
    os.close(fd)


def seen(*args: str, **options):
    return CliRunner().invoke(cli, list(args), prog_name="gptddp-k8s", **options)


def test_the_verbs_show_a_job_on_this_machine(here):
    """By the same words as on a cluster: state, pods, the numbers of rank 0's log."""
    at_ = ["--local", "--local-dir", str(here)]
    result = seen("top", "job", *at_)
    assert result.exit_code == 0, result.output
    assert "job  Running  pods 1/2\n" in result.stdout and "120/400" in result.stdout
    shown = json.loads(seen("status", "job", *at_, "-o", "json").stdout)
    assert shown["progress"]["goodput"] == 0.97 and shown["fault"]["step"] == 99
    assert [it["ready"] for it in shown["pods"]] == [True, False]
    assert shown["pods"][1]["status"].startswith("Error 137 (SIGKILL")  # as of a cluster
    assert shown["causes"][0]["id"] == "crash" and "137 (SIGKILL" in shown["causes"][0]["text"]
    assert seen("list", *at_).stdout.splitlines()[1].split()[:3] == ["job", "Running", "1/2"]
    assert "next: gptddp-k8s top job --local" in seen("status", "job", *at_).stderr
    result = seen("status", "jb", *at_)
    assert result.exit_code == 102 and "no local job jb in " in result.stderr
    assert "there are job" in result.stderr


def test_a_local_job_whose_submit_is_gone_is_stopped(here):
    """Whatever status.json says: nobody runs its pods."""
    (here / "jobs/job/lock").write_text("999999999\n")
    shown = seen("status", "job", "--local", "--local-dir", str(here)).stdout
    assert "state:      Suspended" in shown and "the same submit goes on" in shown
    assert "Stopped" in shown
    assert seen("wait", "job", "--local", "--local-dir", str(here)).exit_code == 103
    (here / "jobs/job/status.json").write_text("{")
    result = seen("status", "job", "--local", "--local-dir", str(here))
    assert result.exit_code == 1 and "jobs/job is no folder of a local job" in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--local", "-n", "x"], "--namespace has no meaning here"),
        (["--local-dir", "x"], "--local-dir has no meaning here: it is for --local"),
    ],
)
def test_options_of_a_cluster_and_of_this_machine_exclude_each_other(options, message):
    """Refused rather than ignored."""
    result = seen("top", "job", *options)
    assert result.exit_code == 2 and message in result.stderr


def test_the_line_of_a_local_job_has_the_same_numbers(here, tmp_path):
    """What rank 0 has told beside its steps; a sparkline where the terminal can show one."""
    more = told(here / "jobs/job/logs/job-worker-0.log")
    assert more.startswith(
        "  goodput 97%  slow rank 3 (demo-worker-3) 2.1 times the median  stalled"
    )
    assert told(tmp_path / "none") == ""
    feed = StepFeed(tmp_path, Config(steps=100))
    for step, loss in ((1, 3.0), (2, 2.0), (3, 1.0)):
        (tmp_path / "log.1.jsonl").write_text(json.dumps({"step": step, "loss": loss}) + "\n")
        line = feed.line(0, 8)
    assert line.startswith("step 3/100  loss 1.000  █▅▁")
