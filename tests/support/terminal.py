"""A command on a terminal of its own."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time

from support.paths import ROOT

# Make the terminal the one of the process's new session, so that Ctrl-C there reaches it.
BEGIN = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
K8S = BEGIN + "from gptddp.k8s import main; main()"
GPTDDP = BEGIN + "from gptddp.cli import cli; cli()"


class Terminal:
    """Runs `code` with these arguments; `seen` is its output that `until` has not taken."""

    def __init__(self, code: str, *args: str, rows: int = 30, columns: int = 90, **env: str):
        self.fd, end = pty.openpty()
        self.resize(rows, columns)
        env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "TERM": "xterm"} | env
        command = [sys.executable, "-c", code, *args]
        terminal = {"stdin": end, "stdout": end, "stderr": end}
        self.process = subprocess.Popen(command, env=env, start_new_session=True, **terminal)
        os.close(end)
        self.seen = ""

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def until(self, text: str, timeout_s: float = 60.0) -> str:
        """Wait for a match of this pattern, and take it off; return the output before it."""
        end = time.monotonic() + timeout_s
        while not (found := re.search(text, self.seen)):
            assert time.monotonic() < end, self.seen[-2000:]
            if select.select([self.fd], [], [], 0.1)[0]:
                try:
                    self.seen += os.read(self.fd, 1 << 16).decode(errors="replace")
                except OSError:  # the process has ended
                    assert re.search(text, self.seen), self.seen[-2000:]
        before, self.seen = self.seen[: found.start()], self.seen[found.end() :]
        return before

    def end(self) -> int:
        try:
            return self.process.wait(20)
        finally:
            self.process.kill()
            os.close(self.fd)


def drawn(text: str) -> list[str]:
    """The successive contents of the terminal's last line, without escapes."""
    parts = re.sub(r"\x1b\[(?!2K)[?\d;]*[A-Za-z]", "", text).split("\r\x1b[2K")
    return [part.splitlines()[-1] for part in parts if part]
