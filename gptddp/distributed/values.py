"""Small values from rank to rank, as JSON: a peer's value is parsed, and never executed.

torch's collectives of objects pickle them, and a pickle can run any code of its sender.
"""

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as td

from gptddp.distributed import pulse
from gptddp.errors import BadMessage

Wait = Callable[[Any], None]  # for a collective that has begun

MOST_BYTES = 256 << 20  # of one value: a larger length is an error


def encode(value: Any) -> bytes:
    """The bytes of a value. Raises TypeError for a value that JSON cannot represent."""
    return json.dumps(value, separators=(",", ":")).encode()


def decode(raw: bytes, sender: str) -> Any:
    """The value that `sender` has sent: tuples have become lists. Raises BadMessage."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:  # bad UTF-8 too
        raise BadMessage(sender, f"{len(raw)} bytes that are not JSON ({error})") from None


def gather(value: Any, names: list[str], device: torch.device, wait: Wait) -> list[Any]:
    """All ranks: every rank's value, by rank. `names`: of the ranks, for messages."""
    mine = _tensor(encode(value), device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in names]
    wait(td.all_gather(sizes, torch.tensor([len(mine)], device=device), async_op=True))
    nbytes = [_size(size, name) for size, name in zip(sizes, names, strict=True)]
    # the collective needs parts of one size
    parts = [mine.new_zeros(max(nbytes)) for _ in names]
    padded = mine.new_zeros(max(nbytes))
    padded[: len(mine)] = mine
    wait(td.all_gather(parts, padded, async_op=True))
    pulse.beat()
    return [
        decode(_bytes(part[:size]), name)
        for part, size, name in zip(parts, nbytes, names, strict=True)
    ]


def broadcast(value: Any, source: int, names: list[str], device: torch.device, wait: Wait) -> Any:
    """All ranks: the value of the rank `source`; other ranks' values are ignored."""
    here = td.get_rank() == source
    data = _tensor(encode(value if here else None), device)
    size = torch.tensor([len(data)], device=device)
    wait(td.broadcast(size, src=source, async_op=True))
    nbytes = _size(size, names[source])
    data = data if here else data.new_zeros(nbytes)
    wait(td.broadcast(data, src=source, async_op=True))
    pulse.beat()
    return decode(_bytes(data), names[source])


def _tensor(raw: bytes, device: torch.device) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).to(device)


def _bytes(data: torch.Tensor) -> bytes:
    return data.cpu().numpy().tobytes()


def _size(size: torch.Tensor, sender: str) -> int:
    nbytes = int(size.item())
    if not 0 < nbytes <= MOST_BYTES:
        raise BadMessage(sender, f"a value of {nbytes} bytes, where 1 to {MOST_BYTES} are allowed")
    return nbytes
