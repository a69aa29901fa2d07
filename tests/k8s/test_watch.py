"""`status --watch` on a real terminal and without one, and its stream of JSON."""

import json
import os
import re
import signal
import threading
from io import StringIO

import pytest
from click.testing import CliRunner
from rich.console import Console
from support.api_objects import at, job, pod
from support.api_server import Log
from support.terminal import K8S, Terminal

from gptddp.k8s.cli.main import cli
from gptddp.k8s.observe.frame import frame
from gptddp.k8s.observe.rank_0_log import progress, rows

SHOWN = {
    "name": "demo",
    "state": "Running",
    "why": "",
    "world": {"text": ""},
    "checkpoint": "step-1.1",
    "replicas": {"ready": 4, "desired": 4},
    "pods": [
        {"name": f"demo-worker-{i}", "status": "Running", "restarts": 0, "age_s": 5, "node": "n"}
        for i in range(4)
    ],
}


def drawn(shown, width=80, colours=False, **about):
    """The lines of a frame."""
    system = "standard" if colours else None
    console = Console(file=StringIO(), width=width, force_terminal=colours, color_system=system)
    console.print(frame(console, shown, **about))
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [20, 40, 79, 80, 200])
def test_no_line_is_wider_than_the_terminal(logged, width):
    """Pods that do not fit into the terminal's height are counted instead."""
    shown = SHOWN | progress(logged)
    lines = drawn(shown, width)
    assert max(map(len, lines)) <= width and "120/400" in "\n".join(lines)
    short = drawn(shown, width, height=len(lines) - 1)
    assert len(short) == len(lines) - 1 and short[-1] == "and 2 more pods"


@pytest.mark.parametrize(("is_now", "has"), [(True, True), (False, False)])
def test_an_old_speed_is_not_shown(logged, is_now, has):
    """The remaining time is not shown either: it is unknown while no step is done."""
    found = progress(logged)
    if not is_now:
        found["progress"] |= {"tok_s": None, "left_s": None}
    lines = "\n".join(drawn(SHOWN | found))
    assert ("44.0 k tok/s  ETA 4 min 40 s" in lines) is has and ("tok/s" in lines) is has


def test_log_text_cannot_move_the_cursor():
    """Escape sequences of a log are shown as text, with colours and without."""
    line = "life 1 ended after step 9: \x1b[2Jgone"
    for colours in (False, True):
        text = "".join(drawn(SHOWN | progress([line]), colours=colours))
        assert "\\x1b[2Jgone" in text and "\x1b[2J" not in text


@pytest.fixture
def running(api, logged):
    """A job of four pods on a cluster, whose rank 0 has the log lines `logged`."""
    api.put(job("Created", "Running"), *map(pod, range(4)))
    api.logs["demo-worker-0"] = Log([(at(n), line) for n, line in enumerate(logged)])
    return api


@pytest.fixture
def watch(running):
    """The command on this test's server."""
    return ["status", "demo", "--watch", "--kubeconfig", str(running.kubeconfig)]


def test_without_a_terminal_the_watch_prints_once(watch, logged):
    """It prints the numbers of `status`, without escape sequences, and exits with 0."""
    result = CliRunner().invoke(cli, watch, prog_name="gptddp-k8s")
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.stdout and "demo  Running  pods 4/4\n" in result.stdout
    # no speed, as its step does not move
    assert re.search(r"^step: +120/400  loss 2.0000\n +━{9}$", result.stdout, re.M)
    once = [it for it in watch if it != "--watch"]
    shown = CliRunner().invoke(cli, once).stdout
    for name, text in rows(progress(logged)).items():
        line = rf"^{name}: +{re.escape(text)}$"
        assert not text or (re.search(line, result.stdout, re.M) and re.search(line, shown, re.M))
    assert "-o json repeats it" in result.stderr


def test_a_watch_as_json_prints_a_line_per_poll_until_the_end(running, watch):
    """Each line is that of `status -o json`; the exit code is that of `wait`."""
    threading.Timer(0.5, running.put, [job("Created", "Succeeded")]).start()
    result = CliRunner().invoke(cli, [*watch, "-o", "json", "--every", "0.2"])
    assert result.exit_code == 0, result.output
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert (found[0]["state"], found[-1]["state"]) == ("Running", "Succeeded")
    assert found[0]["progress"]["step"] == 120 and len(found[0]["pods"]) == 4


def test_the_watch_redraws_its_frame_and_restores_the_terminal(running, watch):
    """It shows new numbers and the job's end; the last frame stays, without escape sequences."""
    screen = Terminal(K8S, *watch, "--every", "0.3", LC_ALL="C.UTF-8")
    screen.until(r"\x1b\[\?1049h")
    screen.until(r"\x1b\[1mdemo  Running  pods 4/4")
    screen.until("120/400[^━]*━")
    log = running.logs["demo-worker-0"]
    log.lines.append((at(59), log.lines[-2][1].replace("120/400", "130/400")))
    screen.until("130/400")
    running.put(job("Created", "Succeeded"))
    screen.until(r"\x1b\[\?25h\x1b\[\?1049l")
    screen.until("demo  Succeeded")
    assert "\x1b" not in screen.until("demo-worker-3")
    assert screen.end() == 0


def test_a_lost_pod_is_shown_before_the_next_update(running, watch):
    """Pods are polled twice a second; a lost pod is named until its ranks train again."""
    screen = Terminal(K8S, *watch, "--every", "600")
    screen.until("pods 4/4")
    running.put(pod(2, phase="Pending", containerStatuses=[]))
    screen.until("demo  Running on 3 of 4: demo-worker-2 is being replaced", 10.0)
    assert "tok/s" not in screen.until("POD")
    screen.process.send_signal(signal.SIGTERM)
    screen.until(r"\x1b\[\?25h\x1b\[\?1049l")
    assert screen.end() == 143


def test_an_interrupt_restores_the_terminal(watch):
    """Ctrl-C ends the watch with its exit code. A resize is drawn at once; NO_COLOR removes
    colours, and a terminal without UTF-8 gets ASCII."""
    env = {"NO_COLOR": "1", "LC_ALL": "C", "PYTHONIOENCODING": "ascii"}
    screen = Terminal(K8S, *watch, "--every", "600", **env)
    shown = screen.until("demo-worker-3 +Running")
    assert "\x1b[31m" not in shown and "----" in shown and "?" not in shown.split("demo  ")[1]
    screen.resize(22, 60)
    screen.until(r"and \d more pods")
    os.write(screen.fd, b"\x03")
    screen.until(r"\x1b\[\?25h\x1b\[\?1049l")
    screen.until("demo  Running")  # the last frame stays
    assert screen.end() == 130
