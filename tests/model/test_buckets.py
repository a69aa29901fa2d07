"""A lost peer interrupts a backward pass: the survivors do the step again, with the same bits.

The processes and gloo are real; the test sets the members of the world.
"""

import contextlib
import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from support import forked
from support.fake_mesh import FakeMesh
from support.loaders import LANES, SEED, SEQ_LEN, corpus, open_loader
from torch.nn.parallel import DistributedDataParallel as DDP

from gptddp.config import Config, with_preset
from gptddp.data.lanes import owned
from gptddp.distributed.connect import World, connect
from gptddp.distributed.lost import is_lost_peer
from gptddp.distributed.members import View
from gptddp.distributed.replicas import state_fp
from gptddp.errors import Broken
from gptddp.model import gpt, optim, sums
from gptddp.model.buckets import settle_buckets
from gptddp.run.progress import Progress
from gptddp.train import forward_backward

MEMBER = "import sys; from model.test_buckets import member_main; member_main(*sys.argv[1:])"
STEPS = 8
ALONE = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")  # as in torchrun
# member: the step (from 0) in whose backward pass it dies
DIES = {2: 2, 0: 4, 3: 6}
CONFIG = with_preset(
    Config(
        n_layer=2,
        n_head=2,
        n_embd=32,
        seq_len=SEQ_LEN,
        lanes=LANES,
        batch=3 * LANES,
        micro_batch=2,
        precision="fp32",
        device="cpu",
        seed=SEED,
        optimizer="autoresearch",
        dropout=0.1,
    ),
    accelerator=False,
)


def enter(world: World, after: int) -> int:
    """Form this member's world by a view newer than `after`; return its number."""
    assert world.members
    while True:
        if isinstance(found := world.members.next_view(after, 1.0), View):
            after = found.number
            with contextlib.suppress(Broken):
                world.form(found)
                return after


def member_main(folder: str, me: str, kind: str) -> None:
    """One member. It writes FOLDER/<me>.found: [layout of the buckets, [hash of each state]]."""
    with connect("cpu") as world:
        torch.set_num_threads(1)
        Path(folder, f"{me}.found").write_text(json.dumps(found(world, int(me), kind)))
        os._exit(0)


def found(world: World, me: int, kind: str) -> list[Any]:
    c = replace(CONFIG, reduce=kind)
    net = gpt.build(c, 257, world.device)
    optimizer = optim.build(net, c, world)
    ddp = DDP(net, gradient_as_bucket_view=True, bucket_cap_mb=0.02)  # many buckets
    made = sums.build(ddp, c, world)
    settle_buckets(ddp, made, c, world)
    layout, states, progress = made.layout(), list[int](), Progress()

    def die(_: torch.Tensor) -> None:
        is_due = len(states) == DIES.get(me) and world.world_size > 1
        if is_due and ddp.require_backward_grad_sync:
            os.kill(os.getpid(), signal.SIGKILL)

    dict(net.named_parameters())["blocks.0.attn.qkv.weight"].register_hook(die)
    assert world.members
    world.members.status("warm")
    state, number = None, enter(world, 0)
    where = {"rank": world.rank, "world_size": world.world_size}
    with open_loader(corpus(), batch=c.batch, **where) as loader:
        while progress.step < STEPS:
            try:
                batch = loader.next()
                targets = int(world.all_reduce(torch.tensor(batch.targets)))
                optimizer.set_lr(c, progress)
                forward_backward(ddp, batch, targets, progress.step, c, world, made)
                optimizer.prepare()
                cursors = world.all_reduce(torch.from_numpy(batch.cursors)).numpy()
            except Exception as error:
                if not is_lost_peer(error):
                    raise
                optimizer.zero_grad()
                number = enter(world, number)
                loader.move(owned(world.rank, world.world_size, c.lanes), state)
                continue
            optimizer.step()
            made.stepped()
            optimizer.zero_grad()
            state = loader.state(cursors)
            progress = replace(progress, step=progress.step + 1)
            states.append(state_fp(optim.state_tensors(net, optimizer) | made.tensors()))
    assert made.layout() == layout
    return [layout, states]


def run(folder: Path, kind: str, members: int) -> dict[int, Any]:
    """The results of the members that live to the end."""
    folder.mkdir()
    mesh = FakeMesh(folder)
    pods, processes = [str(it) for it in range(members)], {}
    try:
        for it in pods:
            own = {"GPTDDP_MEMBERS": str(mesh.path), "POD_NAME": it}
            args = str(folder), it, kind
            processes[it] = forked.fork(MEMBER, *args, env=os.environ | ALONE | own)
        ids = dict(zip(pods, mesh.by_pod(*pods), strict=True))
        mesh.commit([*ids.values()])
        for it in map(str, [*DIES][: members - 1]):
            assert processes[it].wait(60) == -signal.SIGKILL, processes[it].stderr.read()
            del processes[it], ids[it]
            mesh.commit([*ids.values()])
        for process in processes.values():
            assert process.wait(60) == 0, process.stderr.read()
    finally:
        for process in processes.values():
            process.kill()
        mesh.close()
    return {int(it): json.loads((folder / f"{it}.found").read_text()) for it in processes}


def test_a_step_whose_backward_pass_was_interrupted_has_the_bits_of_an_undisturbed_one(
    tmp_path, monkeypatch
):
    """Worlds of 4, 3, 2 and 1: each except the last ends because a member, once rank 0, dies in its
    backward pass. Every state has the bits of a single process."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    ((wanted_layout, wanted),) = run(tmp_path / "alone", "exact", 1).values()
    ((layout, states),) = run(tmp_path / "four", "exact", 4).values()
    assert len(set(wanted)) == STEPS
    assert states == wanted
    assert layout == wanted_layout
