"""A toy model's flags, and training it in the process of the test."""

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from gptddp.distributed.watchdog import STOPS

# A model of 30 k parameters: a step of 8 rows takes milliseconds. It has one thread
# everywhere, as the bits depend on the number of threads.
SMALL = [
    *("--n-layer", "2", "--n-head", "2", "--n-embd", "32", "--seq-len", "32"),
    *("--lanes", "8", "--batch", "8", "--micro-batch", "2", "--warmup-steps", "2"),
    *("--precision", "fp32", "--device", "cpu", "--eval-tokens", "512"),
    *("--cache-dir", "none", "--threads", "1"),
]

# Models of transformers in SMALL's shape: model_type, and the flags.
_MODERN = ["--preset", "modern-tiny", "--kv-heads", "1"]
LAYOUTS = {
    "tied": ("qwen3", _MODERN),
    "windows": ("qwen3", [*_MODERN, "--windows", "SL", "--head", "untied"]),
    "llama": ("llama", [*_MODERN, "--qk-norm", "none"]),
    "untied": ("llama", [*_MODERN, "--qk-norm", "none", "--head", "untied", "--kv-heads", "2"]),
}


@contextlib.contextmanager
def training_here() -> Iterator[None]:
    """Train in this process: one thread, and pytest's signal handlers are put back."""
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr("gptddp.distributed.connect.cpu_quota", lambda: 1)
        for number in STOPS:
            stack.callback(signal.signal, number, signal.getsignal(number))
        yield


def trained(corpus: Path, folder: Path, *flags: str) -> Path:
    """Train the toy in this process, or continue its run in this folder."""
    from gptddp import train

    with training_here():
        assert train.main([*SMALL, "--data", str(corpus), "--run-dir", str(folder), *flags]) == 0
    return folder
