"""Read a configuration from flags, TOML or a saved run; standard library only."""

import argparse
import dataclasses
import functools
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

from gptddp import amounts
from gptddp.config import FIELDS, FIXED, START, Config, shown
from gptddp.errors import ConfigError
from gptddp.presets import PARTS, PRESETS

# The parts of a model that make it a GPT-2.
GPT2 = {name: FIELDS[name].metadata["default"] for name in PARTS}

Groups = Mapping[str, Sequence[str]]  # names of options by the titles of a help

STDIN = "-"
_OF_ONE_START = ("from_scratch", "from_step")  # not even of the run as it is on this machine
_METAVARS = {"int": "N", "float": "F", "seconds": "TIME", "str": "NAME", "tuple": "A,B"}
_FOLDERS = ("data", "run_dir", "cache_dir", "init_from")
_SECONDS = ("max_time", "checkpoint_every")
# The options of `train --help`, by group. `--help-all` shows all fields; those between two groups'
# first fields belong to the earlier group.
MAIN: Groups = {
    "data and run": ("data", "run_dir", "init_from"),
    "model": ("preset", "depth", "n_layer", "n_head", "n_embd", "seq_len"),
    "batch": ("lanes", "batch"),
    "length and rate": ("optimizer", "steps", "max_tokens", "max_time", "lr", "warmup_steps"),
    "numbers and hardware": ("seed", "precision", "device"),
    "what is saved and shown": ("eval_every", "checkpoint_every", "track"),
}


def from_toml(path: str | Path) -> dict[str, Any]:
    """The fields of a TOML file: its `[train]` table, or the top level if it has no such table."""
    table = read_toml(path, "configuration")
    table, path = table.get("train", {k: v for k, v in table.items() if k != "job"}), name_of(path)
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: train is {shown(table)}, but it must be a table: [train]")
    if unknown := [key for key in table if key not in FIELDS]:
        raise ConfigError(f"{path}: unknown key {unknown[0]!r}{did_you_mean(unknown[0], FIELDS)}")
    return {key: _from_toml(f"{path}: {key}", key, v) for key, v in table.items()}


def _from_toml(where: str, name: str, value: Any) -> Any:
    """Like `_from_value`, but accepts 1e3 for a whole number, and texts with units: "1M", "5m"."""
    has_unit = isinstance(value, str) and any(map(str.isalpha, value))
    if _kind(name) in ("int", "seconds") and (has_unit or isinstance(value, float)):
        return from_text(where, name, str(value))
    return _from_value(where, name, value)


def read_toml(path: str | Path, what: str) -> dict[str, Any]:
    """The content of a TOML file, or of stdin for `-`; ConfigError calls the file a `what`.

    Raises OSError for a volume that may come back.
    """
    import tomllib  # two milliseconds of every start

    try:
        file = Path(path)
        if str(path) == STDIN:
            text = _once(sys.stdin)
        else:
            text = _once(file) if file.is_fifo() else file.read_text("utf-8")
        return tomllib.loads(text.removeprefix("\ufeff"))  # the mark that editors on Windows write
    except tomllib.TOMLDecodeError as error:
        fix = 'put texts in quotes, and numbers with a unit too, as in "10k" or "5m"'
        raise ConfigError(f"{name_of(path)} is not valid TOML: {error}: {fix}") from error
    except (OSError, ValueError, RecursionError) as error:  # ValueError: not UTF-8, a long number
        from gptddp.files import may_pass

        if may_pass(error):
            raise
        raise ConfigError(f"cannot read the {what} {path}: {error}") from error


def name_of(path: str | Path) -> str:
    """The name of a file in messages."""
    return "stdin" if str(path) == STDIN else str(path)


@functools.lru_cache(1)
def _once(stream: TextIO | Path) -> str:
    """Read stdin or a pipe, such as `<(...)`, once: two parts of a command need it."""
    return stream.read_text("utf-8") if isinstance(stream, Path) else stream.read()


def from_saved(path: str | Path, values: Mapping[str, Any]) -> Config:
    """The recorded configuration of a run; a field that is missing or null is open.

    Raises ConfigError, naming the file, for values that this version never writes.
    """
    given = {name: v for name, v in values.items() if v is not None}
    if unknown := sorted(given.keys() - FIELDS.keys()):
        raise ConfigError(
            f"{path} has fields of a newer gptddp ({', '.join(unknown)[:200]}): use the version "
            "that wrote them"
        )
    try:
        return Config(**{name: _from_value(name, name, value) for name, value in given.items()})
    except ConfigError as error:
        raise ConfigError(f"{path} cannot be used ({error}): put it back from a backup") from error


def to_saved(config: Config) -> dict[str, Any]:
    """The fields as a run records them in JSON."""
    fields = {name: getattr(config, name) for name in FIELDS if name not in _OF_ONE_START}
    return {name: list(it) if isinstance(it, tuple) else it for name, it in fields.items()}


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`: did you mean 'x'?`, or the whole list if no name is similar."""
    import difflib

    names = list(known)
    near = difflib.get_close_matches(word, names, n=1)
    return f": did you mean {near[0]!r}?" if near else f"; known are {', '.join(names)}"


def _kind(name: str) -> str:
    """The name of the field's type: int, float, str, bool or tuple; seconds, a float of them."""
    if name in _SECONDS:
        return "seconds"
    return str(getattr(FIELDS[name].type, "__name__", FIELDS[name].type))


_PAIR = "two numbers, as in 0.9,0.95"


def _from_value(where: str, name: str, value: Any) -> Any:
    """Convert a TOML or JSON value to the field's type; a float may be a whole number."""
    kind = _kind(name)
    try:
        if kind in ("float", "seconds") and _is_number(value):
            return float(value)
        if kind == "int" and _is_number(value) and isinstance(value, int):
            return value
        if (kind, type(value)) in (("str", str), ("bool", bool)):
            return value
        pair = list(value) if isinstance(value, list | tuple) else []
        if kind == "tuple" and len(pair) == 2 and all(map(_is_number, pair)):
            return (float(pair[0]), float(pair[1]))
    except OverflowError:  # a whole number larger than any float
        pass
    wanted = _PAIR if kind == "tuple" else f"a value of type {kind.replace('seconds', 'float')}"
    raise ConfigError(f"{where} is {shown(value)}: it must be {wanted}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def from_text(where: str, name: str, text: Any) -> Any:
    """Convert a text to the field's type; a flag without a value is already True. ConfigError."""
    kind = _kind(name)
    try:
        if kind == "int":
            return amounts.whole(text)
        if kind == "seconds":
            return amounts.seconds(text)
        if kind == "float":
            return float(text)
        if kind == "tuple":
            first, second = text.split(",")
            return (float(first), float(second))
    except ValueError as error:
        wanted = {
            "tuple": f"it must be {_PAIR}",
            "float": "it must be a number, as in 0.003 or 3e-3",
        }
        raise ConfigError(f"{where} is {shown(text)}: {wanted.get(kind, error)}") from None
    return text


def flag(name: str) -> str:
    """The flag of a field: `n_layer` is `--n-layer`."""
    return "--" + name.replace("_", "-")


def in_groups(names: Iterable[str], main: Groups) -> dict[str, tuple[str, bool]]:
    """The group of each name, and whether `main` lists the name."""
    first, title = {shown[0]: title for title, shown in main.items()}, ""
    return {it: (title := first.get(it, title), it in main[title]) for it in names}


class _Parser(argparse.ArgumentParser):
    """A flag for each field; the help shows the main ones or all. Errors are ConfigErrors."""

    def __init__(self, prog: str, everything: bool) -> None:
        super().__init__(
            prog,
            usage="%(prog)s [--config FILE] [OPTIONS]",
            description="Train a GPT, or continue a run. Every option is a key of the TOML file "
            "too. N may be 400, 10k, 1.5M, 2B or 1e3; TIME 90 (seconds), 45s, 5m or 1h30m.",
            allow_abbrev=False,
            add_help=False,
        )
        for name, (title, main) in in_groups(FIELDS, MAIN).items():
            if name == MAIN[title][0]:
                group = self.add_argument_group(title)
            help = _help(name) if main or everything else argparse.SUPPRESS
            if _kind(name) == "bool":
                group.add_argument(flag(name), action="store_true", default=None, help=help)
                continue
            metavar = "DIR" if name in _FOLDERS else _METAVARS[_kind(name)]
            group.add_argument(flag(name), metavar=metavar, help=help)
        group = self.add_argument_group("this command")
        group.add_argument("--config", metavar="FILE", help="TOML file; its [train] table is read")
        help = "show this and exit; --help-all shows all options"
        group.add_argument("-h", "--help", "--help-all", action="help", help=help)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message[:200])


def _help(name: str) -> str:
    """The help of a field, with its default, or with the defaults of the presets tiny and gpt2."""
    text, default = (FIELDS[name].metadata[it] for it in ("help", "default"))
    if default is None and name in PRESETS["gpt2"]:
        default = ", ".join(f"{it} {PRESETS[it][name]}" for it in ("tiny", "gpt2"))
    default = ",".join(map(str, default)) if isinstance(default, tuple) else default
    return text if default in (None, "") or default is False else f"{text} (default: {default})"


def texts(args: Sequence[str], prog: str = "gptddp train") -> dict[str, Any]:
    """The value of each given flag, as text; True for a flag without one. Raises ConfigError."""
    parser = _Parser(prog, everything="--help-all" in args)
    found, rest = parser.parse_known_args(args)
    for word in rest:
        if not word.startswith("-"):
            raise ConfigError(f"unexpected argument {shown(word)}: give its option, as --steps 90")
        option, known = word.partition("=")[0], [*map(flag, FIELDS), "--config", "--help"]
        raise ConfigError(f"unknown option {shown(option)}{did_you_mean(option, known)}")
    return {name: text for name, text in vars(found).items() if text is not None}


def from_args(args: Sequence[str], prog: str = "gptddp train") -> Config:
    """Read flags; they override the TOML file of `--config`, which overrides the defaults."""
    given = texts(args, prog)
    path = given.pop("config", None)
    values = {} if path is None else from_toml(path)
    values |= {name: from_text(flag(name), name, text) for name, text in given.items()}
    return Config(**values)


def given(c: Config) -> dict[str, Any]:
    """The fields that differ from the defaults."""
    default = Config()
    return {name: v for name in FIELDS if (v := getattr(c, name)) != getattr(default, name)}


def to_args(values: Mapping[str, Any]) -> list[str]:
    """The fields as flags, in the order of the dataclass."""
    args = []
    for name in FIELDS:
        value = values.get(name)
        if value is True:
            args.append(flag(name))
        elif value is not None and value is not False:
            text = ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
            args += [flag(name), text]
    return args


# -- a run that is continued -------------------------------------------------------------------


def of_run(config: Config) -> dict[str, Any]:
    """The fields of the run that are not open."""
    fields = ((name, getattr(config, name)) for name in FIELDS if _fate(name) != START)
    return {name: value for name, value in fields if value is not None}


def continued(config: Config, run: Config) -> Config:
    """The configuration of a life: `config`, with open fields taken from the run.

    Raises ConfigError if `config` has another value for a field that is fixed for the run.
    """
    if fields := changed(of_run(run), of_run(config)):
        what = "; ".join(differences(of_run(run), of_run(config)))
        job = f"; a job's manifest always has a preset: give --preset {run.preset}"
        raise ConfigError(
            f"run {config.run_dir} was started with another configuration ({what}): "
            f"leave out {', '.join(map(flag, fields))} to continue it, "
            f"or give another --run-dir{job if 'preset' in fields else ''}"
        )
    return dataclasses.replace(config, **of_run(run) | of_run(config))


def changed(old: Mapping[str, Any], new: Mapping[str, Any], fate: str = FIXED) -> list[str]:
    """The fields that both have with different values; by default, only fixed fields."""
    both = (name for name in FIELDS if _fate(name) == fate and name in old and name in new)
    return [name for name in both if old[name] != new[name]]


def differences(old: Mapping[str, Any], new: Mapping[str, Any], fate: str = FIXED) -> list[str]:
    """`field: old -> new` for each field that `changed` finds."""
    return [f"{name}: {old[name]} -> {new[name]}" for name in changed(old, new, fate)]


def _fate(name: str) -> str:
    return str(FIELDS[name].metadata["fate"])
