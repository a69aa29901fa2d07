"""The flags that the scripts share, checked before the process group is made."""

import argparse
import math
from pathlib import Path


def parser(
    description: str, epochs: int, batch_size: int, lr: float, save_every: int, folder: str
) -> argparse.ArgumentParser:
    """An ArgumentParser with these defaults; a script adds its own flags."""
    found = argparse.ArgumentParser(description=description)
    found.add_argument("--epochs", type=int, default=epochs)
    found.add_argument(
        "--batch-size", type=int, default=batch_size, help="samples of one process per step"
    )
    found.add_argument("--lr", type=float, default=lr)
    found.add_argument("--seed", type=int, default=1)
    found.add_argument(
        "--save-every", type=int, default=save_every, help="steps between two snapshots"
    )
    found.add_argument("--folder", type=Path, default=Path(folder), help="output of the run")
    found.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    return found


def parse(own: argparse.ArgumentParser, args: list[str] | None) -> argparse.Namespace:
    """Parse the flags. Exits with code 2 if one is invalid."""
    found = own.parse_args(args)
    for name in ("epochs", "batch_size", "save_every"):
        if getattr(found, name) < 1:
            own.error(f"--{name.replace('_', '-')} is {getattr(found, name)}: it must be >= 1")
    if not 0 < found.lr < math.inf:
        own.error(f"--lr is {found.lr}: it must be > 0 and finite")
    if not 0 <= found.seed < 2**32:
        own.error(f"--seed is {found.seed}: it must be >= 0 and < 2**32")
    return found
