"""The trainer's configuration: one frozen dataclass, TOML and flags; standard library only.

Defaults < the preset < TOML (`--config FILE`) < flags. `None` means "the preset decides".
"""

import argparse
import dataclasses
import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from gptddp.errors import ConfigError


def _f(default: Any, help: str, *, fixed: bool = False, least: float | None = None) -> Any:
    """A field with its help and least value; `fixed`: it may not change once the run has begun."""
    return field(default=default, metadata={"help": help, "fixed": fixed, "least": least})


@dataclass(frozen=True)
class Config:
    """Everything that decides a training run. Every field is a flag and a TOML key.

    A field whose default is None is open: `with_preset` closes it, by preset and hardware.
    """

    # paths
    data: str = _f("", "dataset directory, made by `gptddp prepare`")
    run_dir: str = _f(
        "", "run directory: configuration, log, checkpoints; an existing run continues"
    )
    cache_dir: str = _f(
        "auto",
        "local folder to keep packed rows in, so that a restart need not tokenise again; "
        "auto: TMPDIR; none: no cache",
    )
    on_bad: str = _f(
        "fail", "row groups that cannot be read: fail (exit code 2), or quarantine (skip for good)"
    )
    # model
    preset: str = _f(
        None, "tiny, gpt2, gpt2-medium, gpt2-large, gpt2-xl; by default tiny on CPUs, else gpt2"
    )
    n_layer: int = _f(None, "transformer blocks", fixed=True, least=1)
    n_head: int = _f(None, "attention heads", fixed=True, least=1)
    n_embd: int = _f(None, "width, a multiple of n_head", fixed=True, least=1)
    seq_len: int = _f(None, "tokens a row (T)", fixed=True, least=1)
    dropout: float = _f(0.0, "dropout probability", fixed=True)
    # batch
    lanes: int = _f(None, "virtual ranks (V), the largest world size", fixed=True, least=1)
    batch: int = _f(
        None, "rows a step over all ranks (G), a multiple of lanes", fixed=True, least=1
    )
    pack: str = _f(
        None, "documents to rows: best-fit (few are cut) or concat (cut every T tokens)", fixed=True
    )
    mask: str = _f(
        None, "none, or document: attention and positions within a document of a row", fixed=True
    )
    micro_batch: int = _f(None, "rows a rank puts through the model at once, at most", least=1)
    # optimization
    steps: int = _f(None, "optimizer steps of the whole run", least=1)
    max_time: float = _f(
        0.0, "seconds of training after which the run ends early; 0: no limit", least=0
    )
    lr: float = _f(None, "peak learning rate", least=0)
    final_lr: float = _f(0.1, "learning rate at the end, as a part of the peak", least=0)
    warmup_steps: int = _f(None, "steps of linear warm-up", least=0)
    weight_decay: float = _f(0.1, "AdamW decay of the matrices; vectors are never decayed", least=0)
    betas: tuple[float, float] = _f((0.9, 0.95), "AdamW betas, as in 0.9,0.95")
    grad_clip: float = _f(1.0, "largest gradient norm; 0: no clipping", least=0)
    max_skipped: int = _f(
        10, "non-finite steps in a row after which the run fails (exit code 3)", least=1
    )
    # numerics
    seed: int = _f(
        1337, "seed of the weights, the order of the data and dropout", fixed=True, least=0
    )
    precision: str = _f(None, "fp32 or bf16; by default bf16 where the hardware has it", fixed=True)
    device: str = _f(None, "cpu or cuda; by default cuda where there is one")
    # evaluation, log, checkpoints, metrics
    eval_every: int = _f(None, "steps between evaluations; the last step always evaluates", least=1)
    eval_tokens: int = _f(None, "validation tokens of one evaluation, over all ranks", least=1)
    log_every: int = _f(
        10, "steps between two readable lines; the JSON log has every step", least=1
    )
    checkpoint_every: float = _f(60.0, "seconds between checkpoints", least=0)
    keep: int = _f(3, "newest verified checkpoints to keep", least=1)
    metrics_port: int = _f(0, "port of rank 0's Prometheus metrics; 0: none")

    def __post_init__(self) -> None:
        _check(self)


# Shapes of GPT-2 (Radford et al. 2019, table 2). Peak learning rates of GPT-3 at the same sizes
# (Brown et al. 2020, table 2.1), which is also its batch of 0.5 M tokens. `tiny` is ours: a step
# of 12 k tokens, a fraction of a second on two cores.
_ROWS: dict[str, Any] = dict(pack="best-fit", mask="none")
_GPT2: dict[str, Any] = dict(
    **_ROWS,
    n_layer=12, n_head=12, n_embd=768, seq_len=1024, lanes=48, batch=480, micro_batch=10,
    steps=20_000, lr=6e-4, warmup_steps=700, eval_every=250, eval_tokens=2**20,
)  # fmt: skip
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": dict(
        **_ROWS,
        n_layer=4, n_head=4, n_embd=128, seq_len=256, lanes=48, batch=48, micro_batch=12,
        steps=400, lr=3e-3, warmup_steps=40, eval_every=100, eval_tokens=2**16,
    ),
    "gpt2": _GPT2,
    "gpt2-medium": {**_GPT2, "n_layer": 24, "n_head": 16, "n_embd": 1024, "lr": 3e-4},
    "gpt2-large": {**_GPT2, "n_layer": 36, "n_head": 20, "n_embd": 1280, "lr": 2.5e-4},
    "gpt2-xl": {**_GPT2, "n_layer": 48, "n_head": 25, "n_embd": 1600, "lr": 2e-4},
}  # fmt: skip

FIELDS = {f.name: f for f in dataclasses.fields(Config)}
_METAVARS = {"data": "DIR", "run_dir": "DIR", "preset": "NAME", "betas": "A,B"}
_CHOICES = {
    "preset": tuple(PRESETS),
    "pack": ("best-fit", "concat"),
    "mask": ("none", "document"),
    "precision": ("fp32", "bf16"),
    "device": ("cpu", "cuda"),
    "on_bad": ("fail", "quarantine"),
}


def _check(c: Config) -> None:
    """Raise ConfigError with the field, the rule and a fix for anything that cannot work."""
    for name, allowed in _CHOICES.items():
        value = getattr(c, name)
        if value is not None and value not in allowed:
            raise ConfigError(f"{name} is {value!r}: use one of {', '.join(allowed)}")
    for name, f in FIELDS.items():
        value, least = getattr(c, name), f.metadata["least"]
        if value is not None and least is not None and not value >= least:
            raise ConfigError(f"{name} is {value}: it must be at least {least}")
    if not 0 <= c.dropout < 1:
        raise ConfigError(f"dropout is {c.dropout}: it must be at least 0 and below 1")
    if not all(0 <= beta < 1 for beta in c.betas):
        raise ConfigError(f"betas are {c.betas}: each must be at least 0 and below 1")
    if not 0 <= c.metrics_port < 65536:
        raise ConfigError(f"metrics_port is {c.metrics_port}: use 1 to 65535, or 0 for none")
    if c.n_embd and c.n_head and c.n_embd % c.n_head:
        near = max(c.n_head, c.n_embd // c.n_head * c.n_head)
        raise ConfigError(
            f"n_embd {c.n_embd} is not divisible by n_head {c.n_head}: "
            f"use {near} or {near + c.n_head}"
        )
    if c.batch and c.lanes and c.batch % c.lanes:
        low = c.batch // c.lanes * c.lanes
        fix = f"{low} or {low + c.lanes}" if low else f"{c.lanes}"
        raise ConfigError(
            f"batch {c.batch} is not divisible by lanes {c.lanes}: use a batch of {fix}, "
            f"or lanes that divide {c.batch}"
        )


def with_preset(config: Config, *, accelerator: bool) -> Config:
    """Fill every field that was left open from the preset; `accelerator`: is there a GPU."""
    preset = config.preset or ("gpt2" if accelerator else "tiny")
    values = {k: v for k, v in PRESETS[preset].items() if getattr(config, k) is None}
    if config.batch is None and config.lanes is not None:  # keep the batch near the preset's
        values["batch"] = max(1, round(PRESETS[preset]["batch"] / config.lanes)) * config.lanes
    if config.lanes is None and config.batch is not None:  # the largest divisor up to the preset's
        most = min(config.batch, PRESETS[preset]["lanes"])
        values["lanes"] = max(v for v in range(1, most + 1) if config.batch % v == 0)
    return dataclasses.replace(config, preset=preset, **values)


def check_world_size(config: Config, world_size: int) -> None:
    """Refuse more workers than lanes: a rank without a lane would have nothing to train on."""
    if config.lanes is not None and world_size > config.lanes:
        raise ConfigError(
            f"{world_size} workers but only {config.lanes} lanes: every worker needs a lane; "
            f"use at most {config.lanes} workers, or start a new run with more lanes"
        )


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """`field: old -> new` for each fixed field in which two resolved configurations differ."""
    return [
        f"{name}: {old[name]} -> {new[name]}"
        for name, f in FIELDS.items()
        if f.metadata["fixed"] and name in old and name in new and old[name] != new[name]
    ]


# -- the end of a grace period -----------------------------------------------------------------

# Who leaves when, in seconds before the end of the grace period (of 16 s or more): a worker that
# hangs, by itself; the workers that are left, killed by their launcher; the launcher.
WORKER_S, KILL_S, LAUNCHER_S = 8.0, 4.0, 3.0


def limit_s(grace_s: float, margin_s: float) -> float:
    """Seconds from the signal to `margin_s` before the end; below 16 s the margin shrinks too."""
    return grace_s - margin_s * min(1.0, grace_s / 16.0)


# -- TOML and flags ----------------------------------------------------------------------------


def from_toml(path: str | Path) -> dict[str, Any]:
    """The fields of a TOML file: its `[train]` table, or the top level where it has none.

    Raises ConfigError; OSError for trouble of the volume that may pass.
    """
    import tomllib  # two milliseconds of every start

    from gptddp.files import may_pass

    try:
        table = tomllib.loads(Path(path).read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        if may_pass(error):
            raise
        raise ConfigError(f"cannot read the configuration {path}: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    table = table.get("train", {k: v for k, v in table.items() if k != "job"})
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: train is {table!r}, but it must be a table: [train]")
    return {key: _from_value(f"{path}: {key}", _known(path, key), v) for key, v in table.items()}


def _known(path: str | Path, key: str) -> str:
    if key not in FIELDS:
        raise ConfigError(f"{path}: unknown key {key!r}{did_you_mean(key, FIELDS)}")
    return key


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`: did you mean 'x'?`, or the whole list where nothing is near."""
    names = list(known)
    near = difflib.get_close_matches(word, names, n=1)
    return f": did you mean {near[0]!r}?" if near else f"; known are {', '.join(names)}"


def _kind(name: str) -> str:
    """The name of the field's type: int, float, str or tuple."""
    return str(getattr(FIELDS[name].type, "__name__", FIELDS[name].type))


def _from_value(where: str, name: str, value: Any) -> Any:
    """A TOML value as the field's type; a whole number will do for a float."""
    kind = _kind(name)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind == "float" and number:
        return float(value)
    if kind == "int" and isinstance(value, int) and number:
        return value
    if kind == "str" and isinstance(value, str):
        return value
    if kind.startswith("tuple") and isinstance(value, list | tuple) and len(value) == 2:
        return (float(value[0]), float(value[1]))
    raise ConfigError(f"{where} is {value!r}: it must be a value of type {kind}")


def from_values(values: Mapping[str, Any], where: str) -> Config:
    """A configuration from the fields that `dataclasses.asdict` has given, as JSON keeps them.

    Raises ConfigError, with `where` they are from, for an unknown field or a value of another type.
    """
    typed: dict[str, Any] = {}
    for name, value in values.items():
        known = _known(where, name)
        typed[known] = None if value is None else _from_value(f"{where}: {name}", known, value)
    return Config(**typed)


def _from_text(name: str, text: str) -> Any:
    """A flag's text as the field's type."""
    kind = _kind(name)
    try:
        if kind == "int":
            return int(text)
        if kind == "float":
            return float(text)
        if kind.startswith("tuple"):
            first, second = text.split(",")
            return (float(first), float(second))
    except ValueError:
        raise ConfigError(f"{flag(name)} is {text!r}: it must be of type {kind}") from None
    return text


def flag(name: str) -> str:
    """The flag of a field: `n_layer` is `--n-layer`."""
    return "--" + name.replace("_", "-")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def parser(prog: str = "gptddp train") -> argparse.ArgumentParser:
    """The argument parser of the trainer; errors are raised as ConfigError."""
    p = _Parser(prog=prog, allow_abbrev=False, description="Train a GPT; see docs/train.md.")
    p.add_argument("--config", metavar="FILE", help="TOML file; its [train] table is read")
    for name, f in FIELDS.items():
        default = "" if f.default in (None, "") else f" (default: {f.default})"
        p.add_argument(
            flag(name),
            dest=name,
            metavar=_METAVARS.get(name, _kind(name).upper()),
            help=f.metadata["help"] + default,
            default=argparse.SUPPRESS,
        )
    return p


def from_args(args: Sequence[str], prog: str = "gptddp train") -> Config:
    """Flags, over the TOML file that `--config` names, over the defaults."""
    known, rest = parser(prog).parse_known_args(list(args))
    if rest:
        flags = [flag(name) for name in FIELDS]
        raise ConfigError(f"unknown option {rest[0]!r}{did_you_mean(rest[0].split('=')[0], flags)}")
    given = vars(known)
    values = from_toml(path) if (path := given.pop("config")) else {}
    values |= {name: _from_text(name, text) for name, text in given.items()}
    return Config(**values)


def to_args(values: Mapping[str, Any]) -> list[str]:
    """Flags that say the same as these fields, in the order of the dataclass."""
    args = []
    for name in FIELDS:
        if (value := values.get(name)) is not None:
            text = ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
            args += [flag(name), text]
    return args
