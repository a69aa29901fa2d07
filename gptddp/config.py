"""The trainer's configuration: one frozen dataclass; standard library only.

Precedence: defaults < preset < the run to continue < TOML (`--config FILE`) < flags. `None` means
"not given". Such a field stays open until `with_preset` sets it, so a given value is never confused
with a default.
"""

import dataclasses
import math
import os
import re
from dataclasses import dataclass, field
from typing import Any

from gptddp.errors import ConfigError
from gptddp.presets import OPTIMIZERS, PRESETS, fine_tuning_rate, given_by, scaled, wrong_shape

# How a field behaves when a run continues; see `flags.continued`.
FIXED = "fixed"  # defines the model or its computation: another value is refused
KEPT = "kept"  # keeps the run's value, unless another is given; the change is recorded
# Belongs to one start: a path, a port, a device. Hashes fix the contents of the paths, and
# `precision` fixes what the device computes.
START = "start"

TRACKERS = ("wandb", "trackio", "tensorboard")  # see gptddp/track


def _f(
    default: Any,
    fate: str,
    help: str,
    *,
    least: float | None = None,
    most: float | None = None,
) -> Any:
    """A field: its default, its behaviour when a run continues, its help and its bounds."""
    metadata = {"help": help, "fate": fate, "least": least, "most": most, "default": default}
    return field(default=default if fate == START else None, metadata=metadata)


@dataclass(frozen=True)
class Config:
    """All settings of a training run. Every field is a flag and a TOML key.

    A field that is None is open: `with_preset` sets it from preset, defaults and hardware.
    """

    # paths
    data: str = _f("", START, "dataset directory, made by `gptddp prepare`")
    run_dir: str = _f(
        "", START, "run directory: configuration, log, checkpoints; an existing run continues"
    )
    cache_dir: str = _f(
        "auto",
        START,
        "local folder for packed rows, so that a restart does not tokenise again; auto: in TMPDIR; "
        "none: no cache",
    )
    on_bad: str = _f(
        "fail",
        KEPT,
        "if a row group cannot be read: fail (exit code 2), or quarantine (skip it for good)",
    )
    init_from: str = _f(
        "",
        START,
        "Hugging Face model folder (config.json, model.safetensors): a GPT-2 or an exported "
        "model; a new run starts with its shape and weights",
    )
    # model
    preset: str = _f(None, FIXED, f"one of {', '.join(PRESETS)}; default: gpt2, tiny on CPUs")
    depth: int = _f(
        0,
        FIXED,
        "number of blocks; width, heads, batch, learning rate and steps follow from it unless "
        "given; 0: use the preset's",
        least=0,
        most=2**12,
    )
    n_layer: int = _f(None, FIXED, "transformer blocks", least=1, most=2**12)
    n_head: int = _f(None, FIXED, "attention heads", least=1, most=2**18)
    n_embd: int = _f(None, FIXED, "width, a multiple of n_head", least=1, most=2**18)
    seq_len: int = _f(None, FIXED, "input tokens per row (T)", least=1, most=2**20)
    dropout: float = _f(0.0, FIXED, "dropout probability")
    init_sha256: str = _f(
        "",
        FIXED,
        "SHA-256 of the weights in init_from; default: computed at the first start",
    )
    norm: str = _f(
        "layernorm", FIXED, "layernorm, or rmsnorm (without weights; no biases in the model)"
    )
    positions: str = _f("learned", FIXED, "position encoding: learned, or rope (rotary)")
    activation: str = _f("gelu", FIXED, "MLP activation: gelu, relu2 (squared ReLU) or swiglu")
    kv_heads: int = _f(
        None, FIXED, "key and value heads, a divisor of n_head; default: n_head", least=1
    )
    qk_norm: str = _f("none", FIXED, "normalise queries and keys: none or rmsnorm")
    head: str = _f("tied", FIXED, "output layer: tied to the token embedding, or untied")
    softcap: float = _f(0.0, FIXED, "limit logits to this by tanh; 0: no limit", least=0, most=1e6)
    windows: str = _f(
        "L",
        FIXED,
        "attention window of each layer, repeated over the layers: S half a row, L a whole row, as "
        "in SSSL; the last layer always has a whole row",
    )
    extras: str = _f(
        "none",
        FIXED,
        "none, or autoresearch: value embeddings, residual and x0 lambdas, its initial weights",
    )
    # batch
    lanes: int = _f(
        None, FIXED, "equal parts of a batch (V); also the largest world size", least=1, most=2**16
    )
    batch: int = _f(
        None, FIXED, "rows per step over all ranks (G), a multiple of lanes", least=1, most=2**24
    )
    pack: str = _f(
        None,
        FIXED,
        "how documents fill rows: best-fit (cuts few) or concat (cuts every T tokens)",
    )
    mask: str = _f(
        None, FIXED, "document: attention and positions stay within each document; or none"
    )
    micro_batch: int = _f(None, FIXED, "largest number of rows of a lane per forward pass", least=1)
    reduce: str = _f(
        None,
        FIXED,
        "gradient sums: exact (same bits at any world size) or fast; default: exact on CPUs, fast "
        "on GPUs",
    )
    # optimization
    optimizer: str = _f(
        "adamw",
        FIXED,
        "adamw; muon (Muon for the blocks' matrices, AdamW for the rest); autoresearch (that "
        "trainer's recipe of both; lr is the rate of the matrices)",
    )
    steps: int = _f(None, KEPT, "optimizer steps of the whole run", least=1)
    max_tokens: int = _f(
        0,
        KEPT,
        "end the run after this many tokens, if steps do not end it earlier; 0: no limit",
        least=0,
        most=2**53,
    )
    max_time: float = _f(
        0.0,
        KEPT,
        "end the run after this much time in steps, if steps do not end it earlier; waiting for "
        "data is counted; starts, evaluations and checkpoints are not; 0: no limit",
        least=0,
    )
    # the bounds keep lr times weight_decay within fp32
    lr: float = _f(None, KEPT, "peak learning rate", least=0, most=1e30)
    final_lr: float = _f(
        0.1,
        KEPT,
        "learning rate at the end of the run, as a fraction of the peak",
        least=0,
        most=1,
    )
    schedule: str = _f(
        "cosine",
        KEPT,
        "learning rate after the warm-up: cosine, linear, or wsd (stable, then linear decay)",
    )
    warmdown: float = _f(0.2, KEPT, "final fraction of the run in which wsd decays", least=0)
    warmup_steps: int = _f(None, KEPT, "steps of linear warm-up", least=0)
    weight_decay: float = _f(
        0.1, KEPT, "weight decay of matrices; vectors have none", least=0, most=1e3
    )
    betas: tuple[float, float] = _f((0.9, 0.95), KEPT, "AdamW betas, as in 0.9,0.95")
    grad_clip: float = _f(1.0, KEPT, "clip the gradient norm to this; 0: no clipping", least=0)
    max_skipped: int = _f(
        10, KEPT, "fail after more non-finite steps in a row (exit code 3)", least=1
    )
    # numerics
    seed: int = _f(1337, FIXED, "seed for weights, data order and dropout", least=0, most=2**64 - 1)
    precision: str = _f(None, FIXED, "fp32 or bf16; default: fastest on the first start's hardware")
    matmul: str = _f(
        None,
        FIXED,
        "fp32 matrix products: mkl or onednn on CPUs, tf32 on GPUs; default: chosen like precision",
    )
    attention: str = _f(
        None,
        FIXED,
        "causal attention: blocks (matrix products by block of queries) or fused (torch's kernel); "
        "default: chosen like precision",
    )
    threads: int = _f(
        None,
        FIXED,
        "CPU threads per rank; default: the first start's CPUs divided by its ranks",
        least=1,
        most=2**10,
    )
    device: str = _f(None, START, "cpu or cuda; default: cuda if available")
    # evaluation, log, checkpoints, metrics
    eval_every: int = _f(
        None, KEPT, "steps between evaluations; the last step always evaluates", least=1
    )
    eval_tokens: int = _f(
        None, KEPT, "validation tokens of one evaluation, over all ranks", least=1
    )
    sample_tokens: int = _f(
        0, KEPT, "length of a sample text at each evaluation; 0: none", least=0, most=4096
    )
    log_every: int = _f(
        10, KEPT, "steps between two lines on the console; the JSON log has every step", least=1
    )
    checkpoint_every: float = _f(60.0, KEPT, "seconds between checkpoints", least=0)
    keep: int = _f(3, KEPT, "number of newest verified checkpoints to keep", least=1)
    keep_every: int = _f(0, KEPT, "also keep one checkpoint every N steps; 0: none", least=0)
    from_scratch: bool = _f(
        False, START, "start again at step 0 if all checkpoints of the run are lost"
    )
    from_step: int = _f(
        0,
        START,
        "go back to the checkpoint of this step and discard later steps; 0: do not",
        least=0,
    )
    metrics_port: int = _f(
        None, START, "port of rank 0's metrics; 0: none (the default)", least=0, most=65535
    )
    track: str = _f("none", START, f"tracker: {', '.join(TRACKERS)}, or none")

    def __post_init__(self) -> None:
        """Raise ConfigError with the field, the rule and a fix for anything that cannot work."""
        for name in FIELDS:
            if (value := getattr(self, name)) is not None:
                _check_value(name, value)
        if wrong := wrong_shape(self):
            raise ConfigError(wrong)


FIELDS = {f.name: f for f in dataclasses.fields(Config)}
_CHOICES = {
    "preset": tuple(PRESETS),
    "norm": ("layernorm", "rmsnorm"),
    "positions": ("learned", "rope"),
    "activation": ("gelu", "relu2", "swiglu"),
    "qk_norm": ("none", "rmsnorm"),
    "head": ("tied", "untied"),
    "extras": ("none", "autoresearch"),
    "pack": ("best-fit", "concat"),
    "mask": ("none", "document"),
    "optimizer": tuple(OPTIMIZERS),
    "schedule": ("cosine", "linear", "wsd"),
    "precision": ("fp32", "bf16"),
    "matmul": ("mkl", "onednn", "tf32"),
    "attention": ("blocks", "fused"),
    "reduce": ("exact", "fast"),
    "device": ("cpu", "cuda"),
    "on_bad": ("fail", "quarantine"),
    "track": ("none", *TRACKERS),
}
_MOST = 2**31 - 1  # largest whole number, far beyond any use


def shown(value: Any) -> str:
    """Format a value for a message; a long one is cut."""
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= 80 else f"{text[:60]}..."


def _check_value(name: str, value: Any) -> None:
    """Raise ConfigError if the value has the field's type but is not allowed."""
    least, most = (FIELDS[name].metadata[bound] for bound in ("least", "most"))
    allowed = _CHOICES.get(name)
    if allowed and value not in allowed:
        raise ConfigError(f"{name} is {shown(value)}: use one of {', '.join(allowed)}")
    if isinstance(value, str) and not _is_path(value):
        raise ConfigError(f"{name} is {shown(value)}: it cannot be a file name; give another")
    if name == "cache_dir" and not value:
        raise ConfigError("cache_dir is empty: use a folder, auto for TMPDIR, or none")
    if least is not None and not value >= least:
        raise ConfigError(f"{name} is {value}: it must be at least {least}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{name} is {value}: it must be a finite number")
    most = most or (_MOST if isinstance(value, int) else None)
    if most is not None and value > most:
        raise ConfigError(f"{name} is {shown(value)}: it must be at most {most}")
    if name == "softcap" and 0 < value < 0.01:
        raise ConfigError(f"softcap is {value}: use 0 for none, or at least 0.01; 15 is common")
    if name == "init_sha256" and value and not re.fullmatch("[0-9a-f]{64}", value):
        raise ConfigError(f"init_sha256 is {shown(value)}: it must be 64 hex digits, in lower case")
    if name == "dropout" and not 0 <= value < 1:
        raise ConfigError(f"dropout is {value}: it must be at least 0 and below 1")
    if name == "warmdown" and value > 1:
        raise ConfigError(f"warmdown is {value}: it must be a part of the run, at most 1")
    if name == "betas" and not all(0 <= beta < 1 for beta in value):
        raise ConfigError(f"betas are {value}: each must be at least 0 and below 1")


def _is_path(text: str) -> bool:
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def with_preset(config: Config, *, accelerator: bool) -> Config:
    """Set every open field from preset and defaults; `accelerator`: does the machine have a GPU?

    Six fields stay open: `metrics_port`, and `precision`, `matmul`, `attention`, `threads` and
    `device`, which depend on the hardware.
    """
    preset = config.preset or ("gpt2" if accelerator else "tiny")
    defaults = {name: f.metadata["default"] for name, f in FIELDS.items()}
    defaults |= given_by(preset, config.optimizer)
    if config.depth:
        defaults |= scaled(defaults, config)
    defaults["reduce"] = "fast" if accelerator else "exact"
    if config.init_from or config.init_sha256:
        width, optimizer = (getattr(config, it) or defaults[it] for it in ("n_embd", "optimizer"))
        defaults["lr"] = fine_tuning_rate(width, optimizer)
    if defaults["kv_heads"] is None:
        defaults["kv_heads"] = config.n_head or defaults["n_head"]
    values = {k: v for k, v in defaults.items() if getattr(config, k) is None}
    if config.batch is None and config.lanes is not None:  # keep the batch near the preset's
        values["batch"] = max(1, round(defaults["batch"] / config.lanes)) * config.lanes
    if config.lanes is None and config.batch is not None:  # the largest divisor up to the preset's
        most = min(config.batch, PRESETS[preset]["lanes"])
        values["lanes"] = max(v for v in range(1, most + 1) if config.batch % v == 0)
    return dataclasses.replace(config, **values | {"preset": preset})


def check_world_size(config: Config, world_size: int) -> None:
    """Refuse more workers than lanes: a rank without a lane would have nothing to train on."""
    if config.lanes is not None and world_size > config.lanes:
        raise ConfigError(
            f"{world_size} workers but only {config.lanes} lanes: every worker needs a lane; "
            f"use at most {config.lanes} workers, or start a new run with more lanes"
        )
