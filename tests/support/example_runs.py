"""The scripts of examples/ as processes: forked ranks, which kill themselves where a test says."""

import os
from pathlib import Path
from typing import Any

import torch
from support.forked import ranks
from support.paths import ROOT

EXAMPLES = ROOT / "examples"
IMPORT = f"""
import io, os, signal, sys, torch
sys.path.insert(0, {str(EXAMPLES)!r})
import snapshot
"""
# Only rank 1 dies, in its n-th call of a method: rank 0 has to notice.
AT_CALL = """
def dying(self, *args, real={method}, count=[0], **kwargs):
    count[0] += 1
    if count[0] == {n} and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return real(self, *args, **kwargs)
{method} = dying
"""
# All ranks die after the first snapshot of the beginning of epoch n.
BEHIND_EPOCH = """
def dying(path, state, own, world, real=snapshot.save):
    real(path, state, own, world)
    if tuple(state["position"]) == ({n}, 0):
        torch.distributed.barrier()  # the others know only now that it is written
        os.kill(os.getpid(), signal.SIGKILL)
snapshot.save = dying
"""
# Rank 0 dies while it saves its n-th file, after half of the bytes.
WHILE_WRITING = """
def dying(value, file, *args, real=torch.save, count=[0], **kwargs):
    count[0] += hasattr(file, "name")  # objects that are sent are pickled by it too
    if count[0] < {n}:
        return real(value, file, *args, **kwargs)
    whole = io.BytesIO()
    real(value, whole)
    file.write(whole.getvalue()[: whole.tell() // 2])
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
torch.save = dying
"""


def run(world: int, script: str, *flags: str, harm: str = "") -> tuple[list[int], list[str]]:
    """(exit codes, stderr), each by rank, when all have ended."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PET_", "SLURM_"))}
    code = IMPORT + harm + f"import ddp, {script}; ddp.run({script}.main)"
    processes = ranks(world, *flags, code=code, env=clean | {"OMP_NUM_THREADS": "1"})
    try:
        codes = [process.wait(120) for process in processes]
        return codes, [process.stderr.read() for process in processes]
    finally:
        for process in processes:
            process.kill()


def succeed(world: int, script: str, *flags: str) -> list[str]:
    """The stderr of each rank of a run, which must succeed."""
    codes, said = run(world, script, *flags)
    assert codes == [0] * world, "\n".join(said)
    return said


def state(folder: Path) -> Any:
    """The snapshot of a run, without its times."""
    found = torch.load(folder / "snapshot.pt", weights_only=True)
    for row in found.get("rows", ()):
        row.pop("samples_per_s")
    return found


def bits(value: Any) -> Any:
    """The value with every tensor as its bytes, to be compared by ==."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().contiguous().view(-1).view(torch.uint8)
        return value.dtype, tuple(value.shape), flat.numpy().tobytes()
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    return [bits(item) for item in value] if isinstance(value, list | tuple) else value
