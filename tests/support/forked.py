"""Processes that run a piece of code and start fast: forks of one that has imported torch.

An import of the trainer takes two to four seconds of a processor, and most tests of processes need
several new ones. The fork server is this module as a script: a request is a line of JSON on its
standard input, its answers are lines on its standard output. It ends when its input does.
"""

import atexit
import contextlib
import ctypes
import functools
import gc
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from support.processes import free_port

from gptddp.distributed.process import PR_SET_PDEATHSIG

PRELOAD = ("torch._dynamo", "torch.distributed.run", "gptddp.train", "gptddp.launch.launcher")
TRAIN = "from gptddp.distributed.process import run; from gptddp.train import main; run(main)"
LAUNCH = "import runpy; runpy.run_module('gptddp.launch', run_name='__main__')"


class Output:
    """A file that a process writes; open only while it is read."""

    def __init__(self, path: Path) -> None:
        self.path, self.seen = path, 0

    def read(self) -> str:
        """The text that is new since the last call."""
        text = self.path.read_bytes()[self.seen :]
        self.seen += len(text)
        return text.decode()


class Forked:
    """A forked process, with the interface of subprocess.Popen."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.stderr: Output
        self.returncode: int | None = None
        self._ended = threading.Event()

    def end(self, code: int) -> None:
        self.returncode = code
        self._ended.set()

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        assert self.returncode is not None
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[None, str]:
        """None for its stdout, and what it has written to stderr since the last read."""
        self.wait(timeout)
        return None, self.stderr.read()

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """The parent of the forked processes."""

    def __init__(self) -> None:
        self.folder, self.count = tempfile.TemporaryDirectory(), 0
        env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            env=env,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is pytest's
        )
        self.running: dict[int, Forked] = {}
        self._new: list[Forked] = []
        self._answered = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def start(
        self, code: str, args: Sequence[str], env: Mapping[str, str], stderr: Path | None
    ) -> Forked:
        self.count += 1
        path = stderr or Path(self.folder.name, f"{self.count}.stderr")
        path.touch()
        request = {"code": code, "args": args, "env": dict(env)}
        request |= {"stderr": str(path), "stdout": str(stderr or os.devnull)}
        with self._answered:
            assert self.process.stdin and self.process.poll() is None
            print(json.dumps(request), file=self.process.stdin, flush=True)
            assert self._answered.wait_for(lambda: self._new, 120), "no answer"
            process = self._new.pop()
        process.stderr = Output(path)
        return process

    def _read(self) -> None:
        for line in self.process.stdout or ():
            answer = json.loads(line)
            with self._answered:
                if "code" in answer:
                    if process := self.running.pop(answer["pid"], None):
                        process.end(answer["code"])
                else:
                    self._new.append(Forked(answer["pid"]))
                    self.running[answer["pid"]] = self._new[-1]
                    self._answered.notify()

    def close(self) -> None:
        self.process.communicate()
        self.folder.cleanup()


@functools.cache
def _server() -> ForkServer:
    server = ForkServer()
    atexit.register(server.close)
    return server


def fork(
    code: str, *args: str, env: Mapping[str, str] | None = None, stderr: Path | None = None
) -> Forked:
    """Run `code` as `python -c` would, in a session of its own; stderr is appended to that file.

    Its stdout goes to the same file, if one is given, and is dropped otherwise.
    """
    return _server().start(code, args, env or os.environ, stderr)


def ranks(
    world: int, *flags: str, code: str = TRAIN, env: Mapping[str, str] | None = None
) -> list[Forked]:
    """The ranks of one world, each a process that runs `code`; without torchrun."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    found = []
    for rank in map(str, range(world)):
        mine = shared | {"RANK": rank, "LOCAL_RANK": rank} if world > 1 else {}
        found.append(fork(code, *flags, env={**(env or os.environ), **mine}))
    return found


def ended(processes: list[Forked], *codes: int) -> list[str]:
    """The stderr of each, when all have ended with one of these codes (0); all are killed."""
    try:
        for process in processes:
            assert process.wait(300) in (codes or (0,)), process.stderr.read()
        return [process.stderr.read() for process in processes]
    finally:
        for process in processes:
            process.kill()


def train(world: int, *flags: str, code: str = TRAIN) -> list[str]:
    """Train with `world` ranks to the end, which must succeed; return the stderr of each rank."""
    return ended(ranks(world, *flags, code=code))


def become(code: str, args: list[str], env: dict[str, str], stdout: str, stderr: str) -> None:
    """In the child: become the process that was asked for, and run its code to its end."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # ends with the fork server
    os.setsid()
    answer(pid=os.getpid())
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    for fd, path in enumerate((os.devnull, stdout, stderr)):
        opened = os.open(path, flags if fd else os.O_RDONLY)
        os.dup2(opened, fd)
        os.close(opened)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = ["-c", *args]
    main: Any = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    exec(code, vars(main))


def answer(**values: int) -> None:
    """Write a line in one call: parent and child share the pipe, and print may use two."""
    os.write(1, json.dumps(values).encode() + b"\n")


def serve() -> dict[str, Any] | None:
    """Fork for every request, and report every exit. The request in the child, None at the end."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    while True:
        ready = select.select([sys.stdin, reader], [], [])[0]
        if reader in ready:
            os.read(reader, 4096)
        if sys.stdin in ready:
            if not (line := sys.stdin.buffer.raw.readline()):
                return None
            if not os.fork():
                signal.set_wakeup_fd(-1)
                os.close(reader)
                os.close(writer)
                return dict(json.loads(line))
        with contextlib.suppress(ChildProcessError):  # there is no child
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                code = os.waitstatus_to_exitcode(ended[1])
                answer(pid=ended[0], code=code)


if __name__ == "__main__":
    for name in PRELOAD:
        __import__(name)
    gc.freeze()  # children do not search all of torch for garbage, above all when they end
    atexit.register(os.dup2, os.open(os.devnull, os.O_WRONLY), 2)  # Triton would print that garbage
    if request := serve():
        become(**request)
