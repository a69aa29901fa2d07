"""The trainer's configuration: one frozen dataclass; standard library only.

Defaults < the preset < the run that is continued < TOML (`--config FILE`) < flags. `None` means
"not given": a field of the run that nobody gives stays open until `with_preset` closes it, so that
what was given and what is a default are never mixed up.
"""

import dataclasses
import math
import os
import re
from dataclasses import dataclass, field
from typing import Any

from gptddp.errors import ConfigError
from gptddp.presets import OPTIMIZERS, PRESETS, fine_tuning_rate, given_by, scaled, wrong_shape

# What becomes of a field when a run is continued; `flags.continued` goes by it.
FIXED = "fixed"  # it decides the model, or what is computed on which rows: another value is refused
KEPT = "kept"  # it stays as the run has it; another value that is given counts, and is recorded
# A path, a port, a device or a word for one start: each start brings its own. What the paths lead
# to is fixed by hashes, and what the device computes with as `precision`.
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
    """A field: its default, what becomes of it when a run is continued, its help and its bounds."""
    metadata = {"help": help, "fate": fate, "least": least, "most": most, "default": default}
    return field(default=default if fate == START else None, metadata=metadata)


@dataclass(frozen=True)
class Config:
    """Everything that decides a training run. Every field is a flag and a TOML key.

    A field that is None is open: `with_preset` closes it, by preset, default and hardware.
    """

    # paths
    data: str = _f("", START, "dataset directory, made by `gptddp prepare`")
    run_dir: str = _f(
        "", START, "run directory: configuration, log, checkpoints; an existing run continues"
    )
    cache_dir: str = _f(
        "auto",
        START,
        "local folder to keep packed rows in, so that a restart need not tokenise again; "
        "auto: TMPDIR; none: no cache",
    )
    on_bad: str = _f(
        "fail",
        KEPT,
        "row groups that cannot be read: fail (exit code 2), or quarantine (skip for good)",
    )
    init_from: str = _f(
        "",
        START,
        "folder with a GPT-2 in Hugging Face's format, or an exported model (config.json, "
        "model.safetensors), whose shape and weights a new run begins with",
    )
    # model
    preset: str = _f(None, FIXED, f"one of {', '.join(PRESETS)}; default: gpt2, on CPUs tiny")
    depth: int = _f(
        0,
        FIXED,
        "blocks, from which width, heads, batch, rate and steps follow where they are not given; "
        "0: all as the preset has it",
        least=0,
        most=2**12,
    )
    n_layer: int = _f(None, FIXED, "transformer blocks", least=1, most=2**12)
    n_head: int = _f(None, FIXED, "attention heads", least=1, most=2**18)
    n_embd: int = _f(None, FIXED, "width, a multiple of n_head", least=1, most=2**18)
    seq_len: int = _f(None, FIXED, "tokens a row (T)", least=1, most=2**20)
    dropout: float = _f(0.0, FIXED, "dropout probability")
    init_sha256: str = _f(
        "",
        FIXED,
        "hash of the weights of init_from, as the run has it; by default what is found there",
    )
    norm: str = _f("layernorm", FIXED, "layernorm, or rmsnorm: no weights, no biases anywhere")
    positions: str = _f("learned", FIXED, "learned embeddings, or rope: rotated queries and keys")
    activation: str = _f("gelu", FIXED, "of the MLP: gelu, relu2 (squared ReLU) or swiglu")
    kv_heads: int = _f(
        None, FIXED, "heads of keys and values, a divisor of n_head; by default n_head", least=1
    )
    qk_norm: str = _f("none", FIXED, "norm of queries and keys: none or rmsnorm")
    head: str = _f("tied", FIXED, "output weights: tied to the embedding, or untied")
    softcap: float = _f(0.0, FIXED, "largest logit, by tanh; 0: none", least=0, most=1e6)
    windows: str = _f(
        "L",
        FIXED,
        "what a layer sees before a token, repeated over the layers: S, half a row, or L, all of "
        "it, as in SSSL; the last layer sees all",
    )
    extras: str = _f(
        "none",
        FIXED,
        "none, or autoresearch: its value embeddings, residual and x0 lambdas, and first weights",
    )
    # batch
    lanes: int = _f(
        None, FIXED, "parts of a step's rows (V): the most ranks there can be", least=1, most=2**16
    )
    batch: int = _f(
        None, FIXED, "rows a step over all ranks (G), a multiple of lanes", least=1, most=2**24
    )
    pack: str = _f(
        None,
        FIXED,
        "documents to rows: best-fit (few are cut) or concat (cut every T tokens)",
    )
    mask: str = _f(
        None, FIXED, "none, or document: attention and positions within a document of a row"
    )
    micro_batch: int = _f(
        None, FIXED, "rows of a lane that go through the model at once, at most", least=1
    )
    reduce: str = _f(
        None,
        FIXED,
        "sums of gradients: exact (the same bits at any world size) or fast; by default exact on "
        "CPUs, else fast",
    )
    # optimization
    optimizer: str = _f(
        "adamw",
        FIXED,
        "adamw; muon: Muon for the matrices of the blocks, AdamW for the rest; autoresearch: the "
        "same by that trainer's recipe, where lr is the rate of the matrices",
    )
    steps: int = _f(None, KEPT, "optimizer steps of the whole run", least=1)
    max_tokens: int = _f(
        0,
        KEPT,
        "tokens to train on, after which the run ends, if that is before steps; 0: no limit",
        least=0,
        most=2**53,
    )
    max_time: float = _f(
        0.0,
        KEPT,
        "time in steps, waits for data included, after which the run ends, if that is before "
        "steps; starts, evaluations and checkpoints do not count; 0: no limit",
        least=0,
    )
    # times weight_decay it is still a number of fp32
    lr: float = _f(None, KEPT, "peak learning rate", least=0, most=1e30)
    final_lr: float = _f(
        0.1,
        KEPT,
        "learning rate at the end of steps, max_tokens or max_time, as a part of the peak",
        least=0,
        most=1,
    )
    schedule: str = _f(
        "cosine",
        KEPT,
        "learning rate from the warm-up to the end: cosine, linear, or wsd (stable, then a line)",
    )
    warmdown: float = _f(0.2, KEPT, "part of the run, at its end, in which wsd decays", least=0)
    warmup_steps: int = _f(None, KEPT, "steps of linear warm-up", least=0)
    weight_decay: float = _f(
        0.1, KEPT, "decay of the matrices; vectors are never decayed", least=0, most=1e3
    )
    betas: tuple[float, float] = _f((0.9, 0.95), KEPT, "AdamW betas, as in 0.9,0.95")
    grad_clip: float = _f(1.0, KEPT, "largest gradient norm; 0: no clipping", least=0)
    max_skipped: int = _f(
        10, KEPT, "non-finite steps in a row after which the run fails (exit code 3)", least=1
    )
    # numerics
    seed: int = _f(
        1337, FIXED, "seed of weights, order of the data and dropout", least=0, most=2**64 - 1
    )
    precision: str = _f(
        None, FIXED, "fp32 or bf16; by default what is faster on the hardware of the first start"
    )
    matmul: str = _f(
        None,
        FIXED,
        "products of fp32 matrices: mkl or onednn on CPUs, tf32 on GPUs; default: as precision",
    )
    attention: str = _f(
        None,
        FIXED,
        "causal attention: blocks, products of blocks of queries, or fused, torch's kernel; "
        "default: as precision",
    )
    threads: int = _f(
        None,
        FIXED,
        "CPU threads of a rank; by default what the CPUs of the first start give each",
        least=1,
        most=2**10,
    )
    device: str = _f(None, START, "cpu or cuda; by default cuda where there is one")
    # evaluation, log, checkpoints, metrics
    eval_every: int = _f(
        None, KEPT, "steps between evaluations; the last step always evaluates", least=1
    )
    eval_tokens: int = _f(
        None, KEPT, "validation tokens of one evaluation, over all ranks", least=1
    )
    sample_tokens: int = _f(
        0, KEPT, "tokens of a text at each evaluation, for the report; 0: none", least=0, most=4096
    )
    log_every: int = _f(
        10, KEPT, "steps between two readable lines; the JSON log has every step", least=1
    )
    checkpoint_every: float = _f(60.0, KEPT, "seconds between checkpoints", least=0)
    keep: int = _f(3, KEPT, "newest verified checkpoints to keep", least=1)
    keep_every: int = _f(
        0, KEPT, "steps: the first checkpoint in each so many stays for good; 0: none", least=0
    )
    from_scratch: bool = _f(
        False, START, "begin at step 0 again where all checkpoints of the run are gone"
    )
    from_step: int = _f(
        0,
        START,
        "go back to the kept checkpoint of this step, and leave all steps beyond it; 0: no",
        least=0,
    )
    metrics_port: int = _f(
        None, START, "port of rank 0's metrics; 0, as by default: none", least=0, most=65535
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
_MOST = 2**31 - 1  # of a whole number. All of these are far beyond any use


def shown(value: Any) -> str:
    """A value in a message; not all of it where it is long."""
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= 80 else f"{text[:60]}..."


def _check_value(name: str, value: Any) -> None:
    """Raise ConfigError where a value of the field's type is none that it can have."""
    least, most = (FIELDS[name].metadata[bound] for bound in ("least", "most"))
    allowed = _CHOICES.get(name)
    if allowed and value not in allowed:
        raise ConfigError(f"{name} is {shown(value)}: use one of {', '.join(allowed)}")
    if isinstance(value, str) and not _is_path(value):
        raise ConfigError(f"{name} is {shown(value)}: no file can have this name; give another")
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
    """Fill every field that was left open from preset and defaults; `accelerator`: is there a GPU.

    Only `metrics_port` stays open, and `precision`, `matmul`, `attention`, `threads` and `device`:
    the hardware decides.
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
