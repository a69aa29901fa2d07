"""A backward pass that a lost peer cuts off: the survivors do the step again, with the same bits.

The processes are real, and so is gloo: members make a world of theirs as files in a folder say.
"""

import json
import os
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as td
from support import forked
from support.loaders import LANES, SEED, SEQ_LEN, corpus, open_loader
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel as DDP

from gptddp.config import Config, with_preset
from gptddp.distributed.replicas import state_fp
from gptddp.model import gpt, optim, sums
from gptddp.model.buckets import settle
from gptddp.run.progress import Progress
from gptddp.train import forward_backward

MEMBER = "import sys; from model.test_buckets import member_main; member_main(*sys.argv[1:])"
STEPS = 8
# member: the step (from 0) in whose backward pass it ends; the world before it has one more
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


class Group:
    """A world that is made anew in place, as a member of it sees it."""

    def __init__(self, folder: Path, me: int) -> None:
        self.folder, self.me, self.calls = folder, me, 0
        self.rank, self.world_size, self.device = 0, 1, torch.device("cpu")
        store = td.FileStore(str(folder / "addresses"), -1)
        td.init_process_group(
            "gloo", store=store, rank=me, world_size=len(DIES) + 1, enable_reconfigure=True
        )
        self.alone()

    def alone(self) -> None:
        """A world of this one: its connections are closed, which frees its neighbours."""
        self.calls += 1
        c10d._reconfigure(
            1000 * (1 + self.me) + self.calls, [c10d._get_reconfigure_handle()]
        ).wait()
        self.rank, self.world_size = 0, 1

    def form(self, number: int) -> None:
        view = self.folder / f"view.{number}"
        handle = self.folder / f"{number}.{self.me}.new"
        handle.write_text(c10d._get_reconfigure_handle())
        handle.rename(handle.with_suffix(""))
        members = json.loads(read(view))
        handles = [read(self.folder / f"{number}.{it}") for it in members]
        c10d._reconfigure(number + 1, handles).wait()
        self.rank, self.world_size = members.index(self.me), len(members)

    def wait(self, work: Any) -> None:
        work.wait()

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        td.all_reduce(values)
        return values

    def gather_parts(self, mine: torch.Tensor, parts: torch.Tensor) -> None:
        td.all_gather_into_tensor(parts.view(torch.uint8), mine.view(torch.uint8))


def read(path: Path) -> str:
    while not path.exists():
        time.sleep(0.005)
    return path.read_text()


def member_main(folder: str, me: str, kind: str) -> None:
    """One member. It leaves FOLDER/<me>.found: [layout of the buckets, [hash of each state]]."""
    torch.set_num_threads(1)
    c = replace(CONFIG, reduce=kind)
    world: Any = Group(Path(folder), int(me))
    net = gpt.build(c, 257, world.device)
    optimizer = optim.build(net, c, world)
    ddp = DDP(net, gradient_as_bucket_view=True, bucket_cap_mb=0.02)  # many buckets
    made = sums.build(ddp, c, world)
    settle(ddp, made, c, world)
    layout, states, progress = made.layout(), [], Progress()
    if int(me) in DIES and len(json.loads(read(Path(folder) / "view.0"))) > 1:
        last = dict(net.named_parameters())["blocks.0.attn.qkv.weight"]

        def die(_: torch.Tensor) -> None:
            if len(states) == DIES[int(me)] and ddp.require_backward_grad_sync:
                os.kill(os.getpid(), signal.SIGKILL)

        last.register_hook(die)
    state, number = None, 0
    world.form(0)
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
            except RuntimeError as error:
                assert "gloo" in str(error)
                optimizer.zero_grad()
                number += 1
                world.alone()
                world.form(number)
                loader.move(world.rank, world.world_size, state)
                continue
            optimizer.step()
            made.settle()
            optimizer.zero_grad()
            state = loader.state(cursors)
            progress = replace(progress, step=progress.step + 1)
            states.append(state_fp(optim.state_tensors(net, optimizer) | made.tensors()))
    assert made.layout() == layout
    (Path(folder) / f"{me}.found").write_text(json.dumps([layout, states]))
    time.sleep(0.2)
    os._exit(0)


def run(folder: Path, kind: str, members: int, again: int = 2) -> dict[int, Any]:
    """What the members that live to the end have found.

    Begun `again` where a survivor does not come out: gloo forgets a sender once in many losses.
    """
    try:
        return run_once(folder, kind, members)
    except subprocess.TimeoutExpired:
        if not again:
            raise
        return run(folder.with_suffix(f".{again}"), kind, members, again - 1)


def run_once(folder: Path, kind: str, members: int) -> dict[int, Any]:
    """As `run`, or TimeoutExpired."""
    folder.mkdir()
    processes = {
        it: forked.fork(MEMBER, str(folder), str(it), kind, stderr=folder / f"{it}.stderr")
        for it in range(members)
    }
    try:
        for number in range(members):
            view = folder / "new"
            view.write_text(json.dumps(list(processes)))
            view.rename(folder / f"view.{number}")
            if number < members - 1:
                dies = list(DIES)[number]
                assert processes.pop(dies).wait(60) == -signal.SIGKILL, (
                    folder / f"{dies}.stderr"
                ).read_text()
        for it, process in processes.items():
            assert process.wait(60) == 0, (folder / f"{it}.stderr").read_text()
    finally:
        for process in processes.values():
            process.kill()
    return {it: json.loads((folder / f"{it}.found").read_text()) for it in processes}


def test_a_step_whose_backward_pass_was_cut_off_has_the_bits_of_an_undisturbed_one(
    tmp_path, monkeypatch
):
    """Worlds of 4, 3, 2 and 1, each but the last ended by a member that dies within its backward
    pass, rank 0 among them; every state has the bits of a process alone."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    ((wanted_layout, wanted),) = run(tmp_path / "alone", "exact", 1).values()
    ((layout, states),) = run(tmp_path / "four", "exact", 4).values()
    assert len(set(wanted)) == STEPS
    assert states == wanted
    assert layout == wanted_layout
