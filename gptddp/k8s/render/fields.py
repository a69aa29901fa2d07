"""Kinds of a job's fields, as flags and in TOML files: texts, numbers, lists, tables."""

from collections.abc import Mapping
from dataclasses import Field, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptddp.config import shown
from gptddp.errors import ConfigError
from gptddp.flags import flag as flag  # exported with the fields

if TYPE_CHECKING:
    from gptddp.k8s.render.code import Code


class Kind(Enum):
    """The kind of a field; the value is the type that a TOML file must have there."""

    TEXT = "a string"
    QUANTITY = "a quantity such as 2 or '4Gi'"
    NUMBER = "a whole number"
    LIST = "a list of strings"  # a flag that may be repeated
    TABLE = "a table of strings"  # a flag KEY=VALUE that may be repeated
    QUANTITIES = "a table of quantities"
    TREE = "a table, or the name of a YAML file"  # a flag that takes such a file
    CODE = "the name of a folder"  # a flag that takes a folder


TABLES = (Kind.TABLE, Kind.QUANTITIES)


def option(default: Any, help: str, kind: Kind = Kind.TEXT, metavar: str | None = None) -> Any:
    """A dataclass field with its kind, and the help and metavar of its flag."""
    metadata = {"help": help, "kind": kind, "metavar": metavar}
    return field(default=default, metadata=metadata)


def kind(spec_field: "Field[Any]") -> Kind:
    """The kind of a field made by `option`."""
    found: Kind = spec_field.metadata["kind"]
    return found


def from_toml(where: str, kind: Kind, value: Any, folder: Path) -> Any:
    """Convert a TOML value to the value of a field; `folder`: base of relative file names.

    Raises ConfigError that names the key, `where`, for a value of another kind.
    """
    if isinstance(value, str) and "\0" in value:
        raise ConfigError(f"{where} is {value!r:.60}: NUL characters are not allowed: remove them")
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind in TABLES and isinstance(value, dict):
        value_kind = Kind.QUANTITY if kind is Kind.QUANTITIES else Kind.TEXT
        return {k: from_toml(f"{where}.{k}", value_kind, v, folder) for k, v in value.items()}
    if kind is Kind.QUANTITY and number:
        return str(value)
    if kind is Kind.LIST and isinstance(value, str):
        return (value,)
    if kind is Kind.LIST and isinstance(value, list) and all(isinstance(v, str) for v in value):
        return tuple(value)
    if kind is Kind.TREE and isinstance(value, dict):
        return _tree(where, value)
    if kind is Kind.TREE and isinstance(value, str):
        return from_file(where, folder / value)
    if kind is Kind.CODE and isinstance(value, str):
        return from_folder(where, value and folder / value)
    plain_types = {Kind.TEXT: str, Kind.QUANTITY: str, Kind.NUMBER: int}
    if type(value) is plain_types.get(kind):
        return value
    raise ConfigError(f"{where} is {_as_written(value)}: it must be {kind.value}")


def _as_written(value: Any) -> str:
    """A value in TOML's notation, not Python's: `true`, `2026-11-23`."""
    if isinstance(value, bool):
        return str(value).lower()
    return shown(value) if isinstance(value, str | int | float | list | dict) else str(value)


def _tree(where: str, table: Mapping[str, Any]) -> Mapping[str, Any]:
    from gptddp.k8s.render import yaml_text

    try:
        return yaml_text.plain(table)
    except ValueError as error:
        raise ConfigError(f"{where} {error}") from None


def from_file(where: str, file: Path | str) -> Mapping[str, Any]:
    """The one table of a YAML or JSON file. Raises ConfigError that names the option `where`."""
    from gptddp.k8s.render import yaml_text

    path = Path(file)
    try:
        return yaml_text.load(path.read_text("utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ConfigError(f"{where}: cannot read the file {path}: {reason}") from None
    except ValueError as error:
        raise ConfigError(f"{where}: {path} {error}") from None


def from_folder(where: str, folder: Path | str) -> "Code":
    """The code in a folder. Raises ConfigError that names the option `where`."""
    from gptddp.k8s.render import code

    if not folder:
        raise ConfigError(f"{where} is empty: it must be {Kind.CODE.value}; `.` is this one")
    return code.Code(where, Path(folder))


FROM_DISK = {Kind.TREE: from_file, Kind.CODE: from_folder}  # readers of the value of a flag
