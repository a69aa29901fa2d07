"""Exact sums of gradients: grids that fit, non-finite numbers, and accuracy."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from gptddp.distributed.connect import connect
from gptddp.model.sums import ExactSums, FastSums

SLOTS = 12


@pytest.fixture
def world(train_here):
    with connect("cpu") as world:
        yield world


def summed(world, gradients, exponents=None, kind=ExactSums, targets=1, bias=False):
    """(gradient of the step, passes, the sums) for these gradients of the slots, (slots, n).

    bias: add a second tensor, with the gradient 1 in each slot.
    """
    net = nn.Linear(gradients.shape[1], 1, bias=bias)
    ddp = DDP(net, gradient_as_bucket_view=True)
    sums = kind(ddp, len(gradients), world)
    if exponents is not None:
        sums.tensors()["sums.exponents"].copy_(torch.tensor(exponents))
    passes = step(ddp, sums, gradients, targets)
    return net.weight.grad.flatten().clone(), passes, sums


def step(ddp, sums, gradients, targets=1):
    """Do a step; return the number of passes."""
    factor, passes, done = sums.begin(targets), 0, None
    while done is None:
        passes += 1
        assert passes <= 2
        for slot, gradient in enumerate(gradients):
            last = slot == len(gradients) - 1
            if last:
                loss = ddp(gradient[None]).sum()
            else:
                with ddp.no_sync():
                    loss = ddp(gradient[None]).sum()
            sums.took(slot, torch.tensor(0.5))
            if last:
                (loss * factor).backward()
            else:
                with ddp.no_sync():
                    (loss * factor).backward()
                sums.close(slot)
        done = sums.finish()
    assert done == pytest.approx(0.5 * len(gradients), nan_ok=True)
    return passes


def normal(n=1000, scale=1.0):
    return scale * torch.randn(SLOTS, n, generator=torch.Generator().manual_seed(1))


def test_the_order_of_the_slots_changes_no_bit(world):
    """The bits are equal even if the sum is much smaller than the addends, where a float64 sum
    would depend on the order. Fast sums differ."""
    gradients = normal(scale=2.0**-36)
    gradients[1] = normal()[0]
    gradients[0] = -gradients[1]
    other = gradients[torch.randperm(SLOTS, generator=torch.Generator().manual_seed(2))]
    one, two = (summed(world, it)[0] for it in (gradients, other))
    assert one.numpy().tobytes() == two.numpy().tobytes()
    fast = [summed(world, it, kind=FastSums)[0] for it in (gradients, other)]
    assert not torch.equal(*fast)


@pytest.mark.parametrize("place", [3, 50, 999])
def test_a_tensor_that_is_summed_in_chunks_has_the_same_bits(world, monkeypatch, place):
    """The grid of a tensor follows from its largest gradient, whichever chunk has it."""
    gradients = normal()
    gradients[4, place] = -100
    wanted, _, whole = summed(world, gradients)
    monkeypatch.setattr("gptddp.model.sums._CHUNK", 48)
    found, passes, parts = summed(world, gradients)
    assert passes == 2 and torch.equal(found, wanted)
    for sums in (whole, parts):
        sums.stepped()
    assert torch.equal(parts.tensors()["sums.exponents"], whole.tensors()["sums.exponents"])


@pytest.mark.parametrize("scale", [1.0, 1e-12, 1e12])
def test_the_error_is_no_larger_than_that_of_a_fast_sum(world, scale):
    """Against a float64 sum, exact sums are no worse than fast ones, at several magnitudes."""
    gradients = normal(scale=scale)
    exact = gradients.double().sum(0) / 777
    errors = [
        float((summed(world, gradients, kind=kind, targets=777)[0].double() - exact).norm())
        for kind in (ExactSums, FastSums)
    ]
    assert errors[0] <= errors[1]
    assert errors[0] <= 2**-24 * float(exact.norm())


def test_no_grid_that_is_kept_is_too_coarse(world):
    """After larger numbers, or with one far larger number, kept grids are as exact as fast sums."""
    gradients = normal()
    gradients[:, 0] *= 1000
    exact = gradients.double().sum(0)
    _, _, sums = summed(world, gradients)
    sums.stepped()
    exponent, passes, kept = int(sums.tensors()["sums.exponents"]), 1, []
    while passes == 1:
        found, passes, _ = summed(world, gradients, exponent - len(kept))
        kept.append(float((found.double() - exact).norm()))
    fast = float((summed(world, gradients, kind=FastSums)[0].double() - exact).norm())
    assert len(kept) > 6 and max(kept) <= fast


def test_no_grid_that_is_kept_is_too_fine(world):
    """If all numbers were smaller in the previous step, and the large numbers of this step cancel
    each other, no partial sum is beyond 2**53."""
    large, small = torch.ones(5, 1000), normal(scale=2.0**-45)[:2]
    gradients, other = torch.cat([large, small, -large]), torch.cat([large, -large, small])
    _, _, sums = summed(world, gradients)
    sums.stepped()
    exponent, kept = int(sums.tensors()["sums.exponents"]), 0
    while (found := summed(world, gradients, exponent + kept))[1] == 1:
        assert torch.equal(found[0], summed(world, other, exponent + kept)[0])
        kept += 1
    assert kept == 8


def test_a_tensor_that_no_grid_fits_does_not_repeat_steps(world):
    """Such a tensor has the finest grid, which stays when another tensor's grid changes."""
    gradients = normal(scale=2.0**-90)
    _, passes, sums = summed(world, gradients, bias=True)
    sums.stepped()
    finest, other = sums.tensors()["sums.exponents"].tolist()
    assert passes == 2 and finest == 100
    _, passes, _ = summed(world, gradients, [finest, other - 1], bias=True)
    assert passes == 1


@pytest.mark.parametrize("exponents", [0, -60, 20, 60, 90])
def test_a_grid_that_does_not_fit_is_replaced(world, exponents):
    """If a grid is too coarse or too fine, the step is repeated, with the sum of a fitting grid."""
    gradients = normal()
    wanted, _, sums = summed(world, gradients)
    sums.stepped()
    fitting = int(sums.tensors()["sums.exponents"])
    again, passes, lost = summed(world, gradients, exponents)
    assert passes == 2 and torch.equal(again, wanted)
    assert int(lost.tensors()["sums.exponents"]) == exponents  # unchanged until `stepped`
    same, passes, _ = summed(world, gradients, fitting)
    assert passes == 1 and torch.equal(same, wanted)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_reaches_the_sum(world, value):
    """The step is not repeated, the grids stay, and the trainer can skip the step."""
    gradients = normal()
    gradients[5, 7] = value
    found, passes, sums = summed(world, gradients, 30)
    assert passes == 1 and not math.isfinite(found[7])
    sums.stepped()
    assert int(sums.tensors()["sums.exponents"]) == 30


def test_a_tensor_of_zero_gradients_does_not_repeat_steps(world):
    """Zeros fit every grid."""
    found, passes, _ = summed(world, torch.zeros(SLOTS, 5))
    assert passes == 1 and not found.any()


@pytest.mark.parametrize("kind", [ExactSums, FastSums])
@pytest.mark.parametrize("at_once", [False, True])
def test_a_failed_reduction_leaves_no_trace_in_the_repeated_step(world, monkeypatch, kind, at_once):
    """The backward pass is completed, the step fails; repeated, it has the undisturbed bits."""
    net = nn.Linear(1000, 1, bias=False)
    ddp = DDP(net, gradient_as_bucket_view=True)
    sums, gradients = kind(ddp, SLOTS, world), normal()
    step(ddp, sums, gradients)
    wanted = net.weight.grad.clone()
    net.weight.grad.zero_()
    error = RuntimeError("Connection closed by peer")
    failed = torch.futures.Future()
    failed.set_exception(error)

    def all_reduce(*_, async_op=False):
        if at_once:
            raise error
        return SimpleNamespace(get_future=lambda: failed, wait=failed.wait)

    monkeypatch.setattr("torch.distributed.all_reduce", all_reduce)
    finished = []
    monkeypatch.setattr(sums, "finish", lambda: finished.append(1) or type(sums).finish(sums))
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        step(ddp, sums, gradients)
    assert finished
    monkeypatch.undo()
    net.weight.grad.zero_()
    step(ddp, sums, gradients)
    assert torch.equal(net.weight.grad, wanted)


@pytest.mark.parametrize("kind", [ExactSums, FastSums])
def test_all_reductions_of_a_pass_end_before_it_fails(world, monkeypatch, kind):
    """A reduction that still runs would write into the gradients of the repeated step."""
    net = nn.Linear(1000, 1)
    ddp = DDP(net, gradient_as_bucket_view=True, bucket_cap_mb=1e-6)
    sums, works, over = kind(ddp, SLOTS, world), [], []
    step(ddp, sums, normal())

    def wait(work):
        over.append(work)
        if len(over) == 1:
            raise RuntimeError("Connection closed by peer")
        return work.wait()

    def all_reduce(*given, real=torch.distributed.all_reduce, **options):
        works.append(real(*given, **options))
        return works[-1]

    monkeypatch.setattr(world, "wait", wait)
    monkeypatch.setattr("torch.distributed.all_reduce", all_reduce)
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        step(ddp, sums, normal())
    assert len(works) == 2 and over == works
