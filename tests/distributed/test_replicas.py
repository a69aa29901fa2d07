"""The fingerprint of the state: every bit, name and type counts; and differing ranks."""

from types import SimpleNamespace

import pytest
import torch

from gptddp.distributed.replicas import check_replicas, state_fp
from gptddp.errors import Diverged


def state():
    """Tensors of each type in a run; the first is longer than one block of the hash."""
    return {
        "model.w": torch.arange(140_000).remainder(17).float().view(2, 70_000),
        "optim.w.step": torch.tensor(3.0),
        "sums.exponents": torch.arange(5, dtype=torch.int32),
        "half": torch.ones(7, dtype=torch.bfloat16),
        "double": torch.ones(3, dtype=torch.float64),
        "bytes": torch.arange(9, dtype=torch.uint8),
    }


def test_the_fingerprint_stays_the_same_for_ever():
    """The fingerprint of a fixed state never changes, because existing logs have it."""
    assert f"{state_fp(state()):016x}" == "9c3b62c7507815d6"


@pytest.mark.parametrize("name", list(state()))
def test_one_bit_changes_the_fingerprint(name):
    """A bit in the first or last byte of a tensor counts, also beyond the first 2**16 words."""
    before = state_fp(state())
    for at in (0, -1):
        for bit in (0, 6, 7):
            tensors = state()
            tensors[name].view(-1).view(torch.uint8)[at] ^= 1 << bit
            assert state_fp(tensors) != before, (at, bit)


def test_places_names_and_types_change_the_fingerprint():
    """Swapped words, parts of 2**16 words or tensors count, and so do names, types and shapes."""
    tensors, before = state(), state_fp(state())
    flat = tensors["model.w"].view(-1)
    assert flat[0] != flat[1]
    flat[[0, 1]] = flat[[1, 0]]
    assert state_fp(tensors) != before
    tensors = state()
    flat = tensors["model.w"].view(-1)
    flat[: 1 << 17] = torch.cat([flat[1 << 16 : 1 << 17], flat[: 1 << 16]])
    assert state_fp(tensors) != before
    one, two = torch.zeros(2), torch.ones(2)
    assert state_fp({"a": one, "b": two}) != state_fp({"a": two, "b": one})
    assert state_fp({"a": one, "b": two}) != state_fp({"b": one, "a": two})
    assert state_fp({"a": one}) != state_fp({"a": one.view(torch.int32)})
    assert state_fp({"a": one}) != state_fp({"a": torch.zeros(3)})


def test_ranks_that_differ_are_named():
    """One differing bit in either half of the 64 is enough; equal ranks get the fingerprint."""
    tensors, fp = state(), state_fp(state())
    for other in (fp, fp ^ 1, fp ^ 1 << 63):
        world = SimpleNamespace(names=["a", "b", "c"], gather=lambda mine, it=other: [fp, mine, it])
        if other == fp:
            assert check_replicas(tensors, 7, world) == fp
        else:
            with pytest.raises(Diverged) as raised:
                check_replicas(tensors, 7, world)
            assert raised.value.ranks == [2]
