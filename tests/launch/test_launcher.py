"""The launcher before torchrun begins, and the worker's exit."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import ledgers
from support.launchers import START, TOY
from support.pod_env import ENV
from support.processes import free_port
from support.waiting import until

import gptddp
from gptddp.distributed.environment import STARTS
from gptddp.distributed.process import how_ended
from gptddp.launch import worker_script


@pytest.fixture
def python(spawn):
    """python(code, *args, env): a process without this one's variables of a pod."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PET_", "POD_", "GPTDDP_"))}
    pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)

    def begin(code: str, *args: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", code, *args]
        return spawn(command, env=clean | (env or {}), text=True, **pipes)

    return begin


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


# Without torch, only the work before torchrun and the rendezvous succeeds.
LAUNCH = "import runpy; runpy.run_module('gptddp.launch', run_name='__main__')"
EARLY = "import sys; sys.modules['torch'] = None; " + LAUNCH


STOP = {"event": "stop", "step": 5, "cause": "steps"}


@pytest.mark.parametrize(
    ("args", "run", "code", "words"),
    [
        (["--step", "3"], [], 2, "unknown option '--step'"),
        (["--batch", "10", "--lanes", "4"], [], 2, "batch 10 is not divisible by lanes 4"),
        (["--lanes", "3", "--batch", "3"], [], 2, "4 workers but only 3 lanes"),
        # the preset's lanes would be too many or too few
        ([], [{"lanes": 3, "batch": 3}], 2, "4 workers but only 3 lanes"),
        (["--steps", "5"], [{"steps": 5}, STOP], 0, "is finished"),
        (["--steps", "5", "--lr", "1"], [{"steps": 5, "lr": 2.0}, STOP], 2, "no step remains"),
        ([], [], 200, "Traceback"),  # torch is missing: an unexpected error may be retried
    ],
)
def test_a_pod_that_ends_early_prints_one_line(python, tmp_path, args, run, code, words):
    """One line on stderr has the error, or says that the run is finished; even without torch."""
    if run:
        ledgers.begun(tmp_path, *run)
    found, out, err = ended(python(EARLY, "--run-dir", str(tmp_path), *args, env=ENV))
    assert (found, out) == (code, "") and words in err
    assert err.count("\n") == 1 or code == 200


def test_the_launcher_prints_the_trainers_help(python):
    """--help shows the trainer's flags."""
    code, out, _ = ended(python(EARLY, "--help"))
    assert code == 0 and "--run-dir" in out


def test_the_launcher_does_not_start_on_another_torch(forked, tmp_path):
    """Exit code 2 and one line with the reason, before a worker begins."""
    hide = "import torch.distributed.distributed_c10d as it; del it._get_default_store; "
    env = os.environ | ENV | {"GPTDDP_RENDEZVOUS_KEY": "launcher" * 8}
    assert forked(hide + LAUNCH, env=env, stderr=tmp_path / "said").wait(60) == 2
    said = (tmp_path / "said").read_text()
    assert "._get_default_store" in said.splitlines()[-1] and "Traceback" not in said


def test_sigterm_ends_a_launcher_that_imports(python):
    """SIGTERM before torchrun has its handlers gives exit code 143."""
    pod = python(LAUNCH, env=ENV)
    status, wanted = Path(f"/proc/{pod.pid}/status"), 1 << (signal.SIGTERM - 1)

    def caught() -> int:
        return int(status.read_text().split("SigCgt:")[1].split()[0], 16)

    until(lambda: caught() & wanted, poll_s=0.005)
    pod.terminate()
    assert ended(pod)[0] == 143


def test_a_launcher_that_waits_for_its_peers_reports_that_it_is_alive(forked, tmp_path):
    """Its loop reports at intervals, but not before it begins, and not while it is stopped."""
    file = tmp_path / "alive"
    file.touch()
    os.utime(file, times=(0, 0))  # as of an earlier launcher
    env = os.environ | ENV | {"PET_RDZV_ENDPOINT": f"127.0.0.1:{free_port()}"}
    env |= {"GPTDDP_ALIVE": str(file), "POD_ADDRESS": "127.0.0.1"}
    pod = forked(START, str(TOY), "--run-dir", str(tmp_path), env=env)

    def said() -> float:
        """The time of the report; 0 while it is dated ahead, for a read of the volume."""
        at = file.stat().st_mtime if file.exists() else 0.0
        return at if at < time.time() + 1 else 0.0

    first = until(said, "its first sign of life")
    assert abs(first - time.time()) < 30
    until(lambda: said() > first, "the next one")
    trains = (
        "from types import SimpleNamespace as N; "
        "from gptddp.launch.launcher import Launcher, Path; it = Launcher(); "
        "it.verdict, it.mesh = Path('/none'), N(going=True); it.raise_if_over()"
    )
    alone = env | {"GPTDDP_ALIVE": str(tmp_path / "trains")}
    assert forked(trains, env=alone).wait(60) == 0
    assert abs((tmp_path / "trains").stat().st_mtime - time.time()) < 30
    pod.send_signal(signal.SIGSTOP)
    time.sleep(0.1)
    last = file.stat().st_mtime
    time.sleep(1.5)
    assert file.stat().st_mtime == last
    assert pod.poll() is None


SIBLINGS = """
import os, time
from pathlib import Path
from gptddp.launch import siblings
siblings._POLL_S, alive = 0.01, Path(os.environ["GPTDDP_ALIVE"])
def begin(local_rank):
    time.sleep(0.3 * local_rank)
    early = alive.exists()
    own = Path(os.environ["GPTDDP_ALIVE"])
    own.touch()
    os.utime(own, times=(100 + local_rank,) * 2)
    time.sleep(0.3)
    return 7 if early else 0
raise SystemExit(siblings.run(2, begin))
"""


def test_a_pod_of_several_launchers_is_alive_only_if_all_are(forked, tmp_path):
    """The oldest sign of life counts, and none comes before all have begun."""
    env = os.environ | {"GPTDDP_ALIVE": str(tmp_path / "alive")}
    assert forked(SIBLINGS, env=env).wait(60) == 0
    assert (tmp_path / "alive").stat().st_mtime == 100


@pytest.mark.parametrize("workers", [1, 2])
def test_a_mistake_that_the_workers_find_is_reported_once(forked, tmp_path, workers):
    """Without a dataset the pod ends with exit code 2 and one line with the reason."""
    flags = ["--data", str(tmp_path / "none"), "--run-dir", str(tmp_path / "run")]
    env, said = {**os.environ, "PET_NPROC_PER_NODE": str(workers)}, tmp_path / "said"
    code = forked(LAUNCH, *flags, env=env, stderr=said).wait(60)
    err = said.read_text()
    assert code == 2, err
    assert 1 <= err.count("no such folder") <= workers
    assert err.splitlines()[-1].startswith("gptddp.launch: rank ")


@pytest.mark.parametrize("forked", [False, True], ids=["alone", "forked"])
@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        ("return None", 0, ""),
        ("return 0", 0, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit(0)", 0, ""),
        ("return 3", 3, ""),
        ("sys.exit(4)", 4, ""),
        ("sys.exit('no data')", 1, "no data\n"),
        ("raise KeyboardInterrupt", 130, ""),
        ("raise RuntimeError('broken')", 1, "RuntimeError: broken\n"),
    ],
)
def test_a_worker_ends_at_once_unless_its_success_is_waited_for(
    python, forked, body, code, message
):
    """It waits for no thread or handler; a script that multiprocessing runs returns success."""
    script = f"""
import atexit, multiprocessing, os, signal, sys, threading, time
from gptddp.distributed.process import run
def main():
    {body}
def script():
    threading.Thread(target=time.sleep, args=(0.01,)).start()
    atexit.register(print, "late", flush=True)
    run(main)
    print("returned", flush=True)
    os.kill(os.getpid(), signal.SIGTERM)  # it would wait for its agent now, which waits for its end
    time.sleep(60)
if not {forked}:
    script()
child = multiprocessing.get_context("fork").Process(target=script)
child.start(), child.join()
sys.exit(child.exitcode)
"""
    found, out, err = ended(python(script))
    returns = forked and code == 0
    assert found == (143 if returns else code) and err.endswith(message) and "late" not in out
    assert ("returned" in out) == returns


def test_a_trainer_that_cannot_be_imported_ends_the_job_in_its_third_life(
    tmp_path, monkeypatch, capsys
):
    """The third life ends with exit code 5 and the error; torchrun would retry for ever."""
    monkeypatch.setenv("GPTDDP_VERDICT", str(tmp_path / "verdict.json"))
    monkeypatch.setenv("POD_NAME", "demo-worker-0")
    monkeypatch.delattr(gptddp, "train", raising=False)
    monkeypatch.setitem(sys.modules, "gptddp.train", None)
    starts = tmp_path / STARTS
    for life in range(2):
        starts.write_text("+" * (1 + life))
        with pytest.raises(ImportError):  # which `run` prints
            worker_script.main()
    starts.write_text("+++")
    assert worker_script.main() == 5
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    assert verdict["code"] == 5 and verdict["rank"] == 0
    assert "failed 3 times" in verdict["message"] and "gptddp.train" in verdict["message"]
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "how"),
    [
        (0, "its process ended"),
        (3, "its process ended with exit code 3"),
        (-9, "its process died of SIGKILL"),
        (-40, "its process died of signal 40"),  # a signal without a name
    ],
)
def test_the_exit_code_gives_the_end_of_a_worker(code, how):
    """The message names any signal."""
    assert how_ended(code) == how
