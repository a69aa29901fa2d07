"""A Hugging Face model folder: config.json, safetensors, and perhaps a tokenizer.json."""

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from gptddp.config import Config, shown
from gptddp.data.tokenizer import Tokenizer, load_tokenizer, same_ids
from gptddp.errors import ConfigError, DataError
from gptddp.files import exists, is_inside, may_pass, names_in, read_json
from gptddp.pretrained.kind import Kind, rows
from gptddp.pretrained.kinds import kind_of, other_parts

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLE = "pytorch_model.bin"
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_CHUNK = 64 << 20  # bytes read at once


class _Stored(NamedTuple):
    """A tensor as stored in its file, on the CPU."""

    path: Path
    tensor: Tensor


@dataclass(frozen=True)
class Folder:
    """The content of config.json; `fields`: fields of our configuration."""

    path: Path
    kind: Kind
    fields: dict[str, Any]


@dataclass(frozen=True)
class Weights:
    """Tensors by our parameter names, in fp32 on the CPU. sha256: hex, over the folder's tensors:
    their names, shapes and values in fp32, however they are divided into files."""

    tensors: dict[str, Tensor]
    sha256: str


def is_folder(path: Path) -> bool:
    """Does it hold a Hugging Face model, of any kind? Raises OSError."""
    try:
        about = read_json(path / "config.json")
    except (ValueError, NotADirectoryError):
        return False
    return isinstance(about, dict) and "model_type" in about


def open_folder(path: Path) -> Folder:
    """Read config.json. Raises ConfigError with file, rule and fix; OSError that may pass."""
    file = path / "config.json"
    try:
        about = read_json(file)
    except ValueError as error:
        raise ConfigError(f"--init-from: {error}: copy it again from its source") from None
    except OSError as error:
        raise _unreadable(path, error) from error
    if not isinstance(about, dict):
        what = "does not exist" if about is None else "is not an object"
        raise ConfigError(
            f"--init-from: {file} {what}: give a folder written by transformers' save_pretrained, "
            "with config.json and model.safetensors"
        )
    try:
        kind = kind_of(about)
        fields = kind.fields(about)
        if other := other_parts(Config(**fields), kind):
            name = next(iter(other))
            raise ConfigError(f"{name} is {shown(fields[name])}: impossible in a {kind.model_type}")
        return Folder(path, kind, fields)
    except ConfigError as error:
        raise ConfigError(f"--init-from: {file}: {error}") from None


def _unreadable(path: Path, error: OSError) -> Exception:
    """The error for a file that cannot be read: `error` itself, if it may pass."""
    if may_pass(error):
        return error
    return ConfigError(
        f"--init-from {path} cannot be read: {error}: give a folder written by transformers' "
        "save_pretrained, with files that this user may read"
    )


def read_weights(
    folder: Folder,
    shapes: Mapping[str, tuple[int, ...]],
    tokenizer: Tokenizer,
    dataset: Path,
    tell: Callable[[str], None] = lambda _: None,
) -> Weights:
    """All weights of the folder, for a model with these shapes, by our parameter name.

    Embedding rows of positions and tokens that the model does not have are skipped. `tell` is
    called with a text: the file that is being read. Raises ConfigError for a tensor that is
    missing, unknown, damaged, not finite or of another shape, and if the tokenizer is not that of
    the `dataset`; OSError that may pass.
    """
    try:
        known = _check_tokenizer(folder.path, tokenizer, dataset)
        stored = _stored(folder, tell)
        names = {ours: folder.kind.names(ours) for ours in shapes}
        ones = folder.kind.ones(Config(**folder.fields))
        _check_names(folder, stored, {it for theirs in names.values() for it in theirs} | {*ones})
        for ours, theirs in names.items():
            for part, count in zip(theirs, rows(shapes[ours], len(theirs)), strict=True):
                there = (count, *shapes[ours][1:])
                there = there[::-1] if folder.kind.transposed(ours) else there
                _check_shape(ours, part, stored[part], there, tokenizer, known)
        _check_ones(stored, ones)
        return _read(folder.kind, stored, shapes, names)
    except OSError as error:
        raise _unreadable(folder.path, error) from error


def _read(
    kind: Kind,
    stored: Mapping[str, _Stored],
    shapes: Mapping[str, tuple[int, ...]],
    names: Mapping[str, tuple[str, ...]],
) -> Weights:
    digest, found = hashlib.sha256(), {}
    for name in sorted(it for theirs in names.values() for it in theirs):
        tensor = found[name] = _in_fp32(name, stored[name]).contiguous()
        digest.update(f"{name} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.numpy().data)
    tensors = {}
    for ours, theirs in names.items():
        parts = [found.pop(name) for name in theirs]
        tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
        tensor = tensor.t() if kind.transposed(ours) else tensor
        tensors[ours] = tensor[: shapes[ours][0]].contiguous()
    return Weights(tensors, digest.hexdigest())


# -- checks ----------------------------------------------------------------------------------------


def _check_tokenizer(path: Path, tokenizer: Tokenizer, dataset: Path) -> bool:
    """Refuse a folder with another tokenizer than the dataset's. False: the folder has none."""
    file = path / "tokenizer.json"
    if file.name not in names_in(path):  # a broken link counts as a tokenizer
        return False
    try:
        same = same_ids(load_tokenizer(file), tokenizer)
    except DataError as error:
        raise ConfigError(f"--init-from: {error}") from None
    if not same:
        raise ConfigError(
            f"--init-from: {file} gives other tokens than the tokenizer of {dataset}, so its rows "
            "would mean nothing to these weights: prepare the texts with this tokenizer: `gptddp "
            f"prepare SOURCE --tokenizer {file} --out DIR`"
        )
    return True


def _stored(folder: Folder, tell: Callable[[str], None]) -> dict[str, _Stored]:
    """The weights of all files, by name without the prefix."""
    found: dict[str, _Stored] = {}
    for file in _files(folder.path):
        if not exists(folder.path / file):
            raise ConfigError(
                f"--init-from: {folder.path / file} is missing, but {INDEX} names it: copy it too"
            )
        for name, stored in _tensors_in(folder.path / file, tell).items():
            name = name.removeprefix(folder.kind.prefix)
            if name in found:
                raise ConfigError(
                    f"--init-from: {name} occurs twice, in {found[name].path} and {stored.path} "
                    f"(perhaps with and without {folder.kind.prefix!r}): use a folder that has "
                    "each tensor once"
                )
            if not folder.kind.ignored.fullmatch(name):
                found[name] = stored
    return found


def _files(path: Path) -> list[str]:
    """The names of the files with weights."""
    if exists(path / WEIGHTS):
        return [WEIGHTS]
    try:
        index = read_json(path / INDEX)
    except ValueError as error:
        raise ConfigError(f"--init-from: {error}: copy it again from its source") from None
    if index is None:
        raise ConfigError(f"--init-from: {path} has no {WEIGHTS}{_pickled(path)}")
    files = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(files, dict) or not all(map(is_inside, files.values())):
        raise ConfigError(
            f"--init-from: {path / INDEX} has no weight_map from tensors to files of the folder: "
            "copy it again from its source"
        )
    return sorted(set(files.values()))


def _pickled(path: Path) -> str:
    if not any(name.startswith("pytorch_model") for name in os.listdir(path)):
        return ": give a folder with weights in safetensors files"
    return (
        f", only {_PICKLE}: a pickle, which can run any code when it is read, so it is not read. "
        'If you trust it, convert it to safetensors: `python -c "from transformers '
        f"import AutoModelForCausalLM as M; M.from_pretrained('{path}').save_pretrained('OUT')\"`"
    )


def _check_names(folder: Folder, stored: Mapping[str, _Stored], wanted: set[str]) -> None:
    """Refuse a missing tensor, or one that our model does not have."""
    path = folder.path
    if missing := sorted(wanted - stored.keys()):
        raise ConfigError(
            f"--init-from: {path} has no tensor {_some(missing)}, which a {folder.kind.model_type} "
            "with its config.json has: copy all of its files again"
        )
    if unknown := sorted(stored.keys() - wanted - {folder.kind.head}):
        raise ConfigError(
            f"--init-from: {path} has the tensor {_some(unknown)}, which a plain "
            f"{folder.kind.model_type} does not have: use a folder with a plain model"
        )


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1} more)"


def _check_ones(stored: Mapping[str, _Stored], ones: Mapping[str, int]) -> None:
    """Refuse norms with weights other than 1: our model has no weights in norms."""
    for name, size in ones.items():
        tensor = _in_fp32(name, stored[name])
        if tensor.shape != (size,) or not bool((tensor == 1).all()):
            raise ConfigError(
                f"--init-from: {stored[name].path}: {name} is not {size} times 1, but the norms of "
                "our model have no weights: use a folder that `gptddp checkpoints --export` wrote"
            )


def _check_shape(
    ours: str,
    name: str,
    stored: _Stored,
    wanted: tuple[int, ...],
    tokenizer: Tokenizer,
    known: bool,
) -> None:
    """Refuse a wrong shape. `known`: the folder has the tokenizer of the dataset."""
    there = tuple(stored.tensor.shape)
    if there == wanted:
        return
    if ours in ("wte.weight", "head.weight") and there[1:] == wanted[1:]:
        if there[0] > tokenizer.vocab_size and known:  # padded for speed: no text has these tokens
            return
        raise ConfigError(
            f"--init-from: {stored.path}: {name} has {there[0]} tokens, but the tokenizer of the "
            f"dataset has {tokenizer.vocab_size}: prepare the texts with the tokenizer.json of the "
            "model, and put that file into the model's folder too"
        )
    if ours == "wpe.weight" and there[1:] == wanted[1:] and there[0] >= wanted[0]:
        return
    raise ConfigError(
        f"--init-from: {stored.path}: {name} is of shape {list(there)}, but config.json requires "
        f"{list(wanted)}: the two files belong to different models; copy both again"
    )


# -- a file of safetensors -------------------------------------------------------------------------


def _tensors_in(path: Path, tell: Callable[[str], None] = lambda _: None) -> dict[str, _Stored]:
    """The tensors of a file by name. It is read, not mapped: a mapped file that the volume loses
    would end the process by a signal. Raises OSError; ConfigError if it is no safetensors file."""
    chunks = []
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            chunks.append(chunk)
            tell(f"reading {path}: {len(chunks) * _CHUNK >> 20} MiB")
    try:
        found = load(b"".join(chunks))
    except (SafetensorError, KeyError) as error:  # KeyError: a dtype that torch does not have
        raise ConfigError(
            f"{path} is damaged, or no safetensors file ({error}): copy the file again from its "
            "source"
        ) from None
    return {name: _Stored(path, tensor) for name, tensor in found.items()}


def _in_fp32(name: str, stored: _Stored) -> Tensor:
    """Convert a tensor to fp32. Raises ConfigError if its dtype or values cannot be used."""
    path, tensor = stored
    if tensor.dtype not in _FLOATS:
        raise ConfigError(
            f"{path}: {name} is of {tensor.dtype}: use float32, float16 or bfloat16; convert other "
            "weights, such as quantized ones, first"
        )
    tensor = tensor.float()
    if not bool(torch.isfinite(tensor).all()):
        raise ConfigError(
            f"{path}: {name} has values that are not finite (NaN or infinite): a run that starts "
            "with them has no finite step; use earlier weights"
        )
    return tensor
