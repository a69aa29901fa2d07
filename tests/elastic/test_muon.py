"""Muon in real processes: the bits of one process in any world, and no half-done step."""

import os
from pathlib import Path

import pytest
from support import forked
from support.audits import audit
from support.same_bits import check_same_bits
from support.toy import SMALL

from gptddp.run.history import history, read_ledger

STEPS = 10
EVERY_STATE = "from gptddp.training import life; life.CHECK_EVERY = 1\n"

# In its seventh step rank 1 of the first life ends while the others are in the gather: rank 0 has
# the part of rank 2 by then, and none of rank 1.
KILLED = """
import os, signal, time
from gptddp.distributed.connect import World

gather, calls, FILE = World.gather_parts, [], os.environ["KILLED"]

def killed(self, mine, parts):
    calls.append(1)
    if self.rank == 1 and len(calls) == 7 and not os.path.exists(FILE):
        open(FILE, "w").close()
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    gather(self, mine, parts)

World.gather_parts = killed
"""

# In its seventh step the rank ends after half of its matrices; the others have changed theirs.
KILLED_LATER = """
import os, signal
from gptddp.model.muon import Muon

step, take, steps, taken, FILE = Muon.step, Muon._take, [], [], os.environ["KILLED"]

def counted(self):
    steps.append(1)
    taken.clear()
    step(self)

def killed(self, update, weight):
    taken.append(1)
    if os.environ.get("RANK") == "1" and len(steps) == 7 and len(taken) > len(self._matrices) / 2:
        if not os.path.exists(FILE):
            open(FILE, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
    take(self, update, weight)

Muon.step, Muon._take = counted, killed
"""


def flags(data: Path, run: Path, kind: str) -> list[str]:
    places = ["--data", str(data), "--run-dir", str(run), "--checkpoint-every", "3600"]
    return [*SMALL, *places, "--optimizer", kind, "--lr", "0.01", "--steps", str(STEPS)]


def trained(world: int, *args: str) -> None:
    forked.train(world, *args, code=EVERY_STATE + forked.TRAIN)


@pytest.fixture(scope="module")
def undisturbed(corpus, tmp_path_factory):
    """undisturbed(kind): the run of one process, with the fingerprint of each state."""
    made: dict[str, Path] = {}

    def of(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp("muon") / kind
            trained(1, *flags(corpus, made[kind], kind))
        return made[kind]

    return of


@pytest.mark.parametrize(("world", "kind"), [(3, "autoresearch"), (5, "muon")])
def test_every_world_has_the_bits_of_one_process(corpus, undisturbed, tmp_path, world, kind):
    """With 3 and 5 ranks, every loss, every state and the bytes of the last state are equal."""
    trained(world, *flags(corpus, tmp_path / "run", kind))
    check_same_bits(tmp_path / "run", undisturbed(kind))
    assert all("state_fp" in line for line in history(tmp_path / "run"))


@pytest.mark.parametrize(
    ("kind", "killed", "step"),
    [("muon", KILLED, 6), ("autoresearch", KILLED_LATER, 7)],
    ids=["gather", "step"],
)
def test_a_lost_peer_leaves_no_half_done_step(corpus, undisturbed, tmp_path, kind, killed, step):
    """If a peer is lost in the gather, the survivors keep the step before; if it is lost within its
    updates, they keep that step. Parameters, momentum and moments are those of an undisturbed
    process, no step is repeated, and the run ends with the same bits."""
    run = tmp_path / "run"
    env = {"PET_NPROC_PER_NODE": "3", "OMP_NUM_THREADS": "1", "KILLED": str(tmp_path / "killed")}
    code = EVERY_STATE + killed + forked.LAUNCH
    log = tmp_path / "log"
    pod = forked.fork(code, *flags(corpus, run, kind), env=os.environ | env, stderr=log)
    try:
        assert pod.wait(120) == 0, log.read_text()
    finally:
        pod.kill()
    events = read_ledger(run)
    assert [event["event"] for event in events].count("start") == 1
    (lost,) = [it for it in events if it["event"] == "world" and it["lost"]]
    assert (lost["step"], lost["world_size"]) == (step, 2)
    check_same_bits(run, undisturbed(kind))


def test_an_audit_recomputes_a_run_with_muon(undisturbed):
    """An audit derives rates, momenta and decays of every step from log and configuration."""
    code, text = audit(undisturbed("autoresearch"), "--whole")
    assert code == 0 and f"same bits: steps 1 to {STEPS} of {STEPS}" in text
