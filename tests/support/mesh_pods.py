"""Pods of a mesh as processes: a launcher with its mesh, and a worker like a trainer's.

python mesh_pods.py launcher '{"address": ..., ...}'      starts workers, one after the other
python mesh_pods.py worker PATH POD LOG
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

KEY = "k" * 32


def launcher(facts):
    """Runs until it is killed; each worker that ends is replaced after a while."""
    from gptddp.launch.mesh import Mesh

    folder, key = facts["folder"], facts.get("key", KEY)
    names = ("address", "port", "seeds", "least", "most")
    mesh = Mesh(key, "id", *(facts[name] for name in names), folder)
    path = mesh.start()

    def false_proof(*_):
        mesh._loop.call_soon_threadsafe(mesh._died, [*mesh.views.rows][-1])

    def say_much(*_):
        for _ in range(20_000):
            mesh._loop.call_soon_threadsafe(lambda: mesh._links.send(mesh._row))

    signal.signal(signal.SIGUSR1, false_proof)
    signal.signal(signal.SIGUSR2, say_much)
    while True:
        command = [sys.executable, __file__, "worker", path, facts["pod"], f"{folder}/log"]
        subprocess.run(command)
        time.sleep(facts.get("pause_s", 0.5))


def worker(path, pod, log):
    """Attaches, becomes fresh or warm, and going in a view; logs every message that it gets."""
    link = socket.socket(socket.AF_UNIX)
    link.connect(path)

    def say(value):
        link.sendall(json.dumps(value).encode() + b"\n")

    def note(value):
        line = json.dumps({"at": time.monotonic(), "pid": os.getpid(), **value})
        with open(log, "a") as file:
            file.write(line + "\n")

    def attach():
        say({"attach": {"id": uuid.uuid4().hex, "pod": pod}})
        say({"post": ["hello", pod]})

    def take(number):
        while not os.path.exists(f"{log}.lease"):
            time.sleep(0.05)
        say({"lease": number})

    attach()
    lines = link.makefile("rb")
    for line in lines:
        told = json.loads(line)
        note(told)
        if "going" in told:
            say({"status": "warm" if told["going"] else "fresh"})
        if "view" in told and not os.path.exists(f"{log}.late"):
            say({"post": ["at", [told["view"]["number"]]]})
            say({"status": "going"})
        if "out" in told:
            attach()
        if "lease" in told:
            threading.Thread(target=take, args=[told["lease"]["number"]], daemon=True).start()
    lines.close()
    link.close()


class Pod:
    """A launcher's process, as the test sees it."""

    def __init__(self, folder, address, port, seeds, least, most, **more):
        self.folder, self.address, self.port = Path(folder), address, port
        self.folder.mkdir(parents=True, exist_ok=True)
        facts = {"folder": str(folder), "address": address, "port": port, "seeds": seeds}
        facts |= {"least": least, "most": most, "pod": address, **more}
        command = [sys.executable, __file__, "launcher", json.dumps(facts)]
        self.process = subprocess.Popen(command, start_new_session=True)

    def log(self):
        with contextlib.suppress(FileNotFoundError):
            lines = (self.folder / "log").read_text().split("\n")[:-1]
            return [json.loads(line) for line in lines]
        return []

    def views(self):
        return [line for line in self.log() if "view" in line]

    @property
    def view(self):
        """(number, pods by rank) of the newest view; (0, []) for none."""
        views = self.views()
        last = views[-1]["view"] if views else {"number": 0, "members": []}
        return last["number"], [m["pod"] for m in last["members"]]

    @property
    def worker(self):
        return self.log()[-1]["pid"]

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


if __name__ == "__main__":
    if sys.argv[1] == "launcher":
        launcher(json.loads(sys.argv[2]))
    worker(*sys.argv[2:])
