"""`logs -f` on a real cluster, while pods are deleted."""

import time
from collections import defaultdict

from support.cluster_jobs import start
from support.small_jobs import job

COUNT = """
import os, signal, sys, time, uuid
def stop(*_):
    print(life, "last", number, flush=True)
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
life, number, end = uuid.uuid4().hex[:8], 0, float(sys.argv[1])
while time.time() < end:
    print(life, number, flush=True)
    number += 1
    time.sleep(0.01)
print(life, "last", number, flush=True)
"""


def test_logs_loses_no_line_when_pods_are_killed(namespace):
    """`logs -f` follows from the start over four killed pods: the count of each has no gap."""
    end = time.time() + 50
    namespace.kubectl("create", "-f", "-", stdin=job("count", COUNT, str(end), replicas=3))
    follower = start(namespace, "logs", "-f", "count")
    for pods in (["count-worker-2"], ["count-worker-0"], ["count-worker-1", "count-worker-2"]):
        for name in (f"count-worker-{n}" for n in range(3)):
            namespace.kubectl("wait", f"pod/{name}", "--for=create", "--timeout=30s")
            namespace.kubectl("wait", f"pod/{name}", "--for=condition=Ready", "--timeout=30s")
        time.sleep(3)
        namespace.kubectl("delete", "pod", "--force", *pods)
    out, err = follower.communicate(timeout=90)
    assert follower.returncode == 0 and "count: Succeeded" in err
    lives = defaultdict(list)
    for line in out.splitlines():
        pod, life, *words = line.split()
        lives[pod, life].append(words)
    assert len(lives) >= 7 and {pod for pod, _ in lives} == {"[w0]", "[w1]", "[w2]"}
    for lines in lives.values():
        numbers = [words[0] for words in lines if words[0] != "last"]
        assert numbers == [str(n) for n in range(len(numbers))]
    ends = [lines[-1] == ["last", str(len(lines) - 1)] for lines in lives.values()]
    assert ends.count(True) >= 3  # the last lines of a killed pod may not leave its node
