"""The fingerprint of the state, and its comparison over all ranks."""

import functools
from collections.abc import Mapping

import torch
import xxhash
from torch import Tensor

from gptddp.distributed.connect import World
from gptddp.errors import Diverged

CHECK_EVERY = 100  # steps between two comparisons of the ranks
_WORDS = 1 << 16  # multiplied at a time: they stay in the cache


def check_replicas(tensors: Mapping[str, Tensor], step: int, world: World) -> int:
    """All ranks: fingerprint the state; raise Diverged on every rank unless all are equal."""
    mine = state_fp(tensors)
    digests = dict(enumerate(world.gather(mine)))
    if len(set(digests.values())) > 1:
        raise Diverged(digests, step, world.names)
    return mine


@torch.no_grad()
def state_fp(tensors: Mapping[str, Tensor]) -> int:
    """A 64-bit fingerprint of the names and bytes of all tensors, computed where they are.

    Multilinear hashing (Lemire and Kaser 2014): each word of a tensor is multiplied by the odd
    number of its place, and the products are added in int64, with wrap-around. So the order does
    not matter, and only 8 bytes of each 2**16 words leave the device. One other word changes it.
    """
    digest, sums = xxhash.xxh3_64(), []
    for name, tensor in tensors.items():
        flat = tensor.detach().contiguous().view(-1)
        words = flat.view({1: torch.uint8, 2: torch.int16}.get(flat.itemsize, torch.int32))
        keys = keys_of(tensor.device)
        sums += [(part * keys[: len(part)]).sum() for part in torch.split(words, _WORDS)]
        digest.update(f"{name} {flat.dtype} {len(flat)}\n".encode())
    for part in torch.split(torch.stack(sums).cpu(), _WORDS):
        digest.update(part.numpy().data)
    return digest.intdigest()


@functools.cache
def keys_of(device: torch.device) -> Tensor:
    """2**16 fixed odd numbers: the hash of each number's index. To make them takes 50 ms."""
    numbers = [xxhash.xxh3_64_intdigest(i.to_bytes(4, "little")) | 1 for i in range(_WORDS)]
    return torch.tensor([n - (n >> 63 << 64) for n in numbers], dtype=torch.int64, device=device)
