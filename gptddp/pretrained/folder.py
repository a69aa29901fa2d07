"""A model in a folder of Hugging Face's: config.json, safetensors, and perhaps a tokenizer.json."""

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
    """A tensor as its file has it, on the CPU."""

    path: Path
    tensor: Tensor


@dataclass(frozen=True)
class Folder:
    """What config.json says; `fields`: of our configuration."""

    path: Path
    kind: Kind
    fields: dict[str, Any]


@dataclass(frozen=True)
class Weights:
    """By name of ours, in fp32 on the CPU. sha256: hex, over those of the folder, as it has them:
    their names, shapes and values in fp32, however they are cut into files."""

    tensors: dict[str, Tensor]
    sha256: str


def is_folder(path: Path) -> bool:
    """Does it hold a model of Hugging Face's, of whatever kind? Raises OSError."""
    try:
        about = read_json(path / "config.json")
    except (ValueError, NotADirectoryError):
        return False
    return isinstance(about, dict) and "model_type" in about


def open_folder(path: Path) -> Folder:
    """Read config.json. Raises ConfigError, naming file, rule and fix; OSError that may pass."""
    file = path / "config.json"
    try:
        about = read_json(file)
    except ValueError as error:
        raise ConfigError(f"--init-from: {error}: copy it anew from where it came from") from None
    except OSError as error:
        raise _unreadable(path, error) from error
    if not isinstance(about, dict):
        what = "is not there" if about is None else "is not an object"
        raise ConfigError(
            f"--init-from: {file} {what}: name a folder as transformers' save_pretrained writes "
            "it, with config.json and model.safetensors"
        )
    try:
        kind = kind_of(about)
        fields = kind.fields(about)
        if other := other_parts(Config(**fields), kind):
            name = next(iter(other))
            raise ConfigError(f"{name} is {shown(fields[name])}: a {kind.model_type} has none such")
        return Folder(path, kind, fields)
    except ConfigError as error:
        raise ConfigError(f"--init-from: {file}: {error}") from None


def _unreadable(path: Path, error: OSError) -> Exception:
    """The error for what cannot be read: itself, where it may pass."""
    if may_pass(error):
        return error
    return ConfigError(
        f"--init-from {path} cannot be read: {error}: name a folder as transformers' "
        "save_pretrained writes it, whose files this user may read"
    )


def read_weights(
    folder: Folder,
    shapes: Mapping[str, tuple[int, ...]],
    tokenizer: Tokenizer,
    dataset: Path,
    tell: Callable[[str], None] = lambda _: None,
) -> Weights:
    """All weights of the folder, for a model whose parameters have these shapes, by name of ours.

    Of embeddings the rows of positions and tokens that the model does not have are left out.
    `tell` is told which file is being read. Raises ConfigError for a tensor that is missing,
    unknown, damaged, not finite or of another shape, and for another tokenizer than that of the
    `dataset`; OSError that may pass.
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


# -- what is refused -------------------------------------------------------------------------------


def _check_tokenizer(path: Path, tokenizer: Tokenizer, dataset: Path) -> bool:
    """Is the tokenizer of the folder, where it has one, known to be that of the dataset?"""
    file = path / "tokenizer.json"
    if file.name not in names_in(path):  # a link that leads nowhere is one
        return False
    try:
        same = same_ids(load_tokenizer(file), tokenizer)
    except DataError as error:
        raise ConfigError(f"--init-from: {error}") from None
    if not same:
        raise ConfigError(
            f"--init-from: {file} gives other tokens than the tokenizer of {dataset}, whose rows "
            "would mean nothing to these weights: prepare the texts with it, by `gptddp prepare "
            f"SOURCE --tokenizer {file} --out DIR`"
        )
    return True


def _stored(folder: Folder, tell: Callable[[str], None]) -> dict[str, _Stored]:
    """The tensors of all files by name, without the prefix and without what is no weight."""
    found: dict[str, _Stored] = {}
    for file in _files(folder.path):
        if not exists(folder.path / file):
            raise ConfigError(
                f"--init-from: {folder.path / file} is not there, and {INDEX} names it: copy it too"
            )
        for name, stored in _tensors_in(folder.path / file, tell).items():
            name = name.removeprefix(folder.kind.prefix)
            if name in found:
                raise ConfigError(
                    f"--init-from: {name} is there twice, in {found[name].path} and {stored.path} "
                    f"(with and without {folder.kind.prefix!r}, perhaps): use a folder that has "
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
        raise ConfigError(f"--init-from: {error}: copy it anew from where it came from") from None
    if index is None:
        raise ConfigError(f"--init-from: {path} has no {WEIGHTS}{_pickled(path)}")
    files = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(files, dict) or not all(map(is_inside, files.values())):
        raise ConfigError(
            f"--init-from: {path / INDEX} has no weight_map from tensors to files of the folder: "
            "copy it anew from where it came from"
        )
    return sorted(set(files.values()))


def _pickled(path: Path) -> str:
    if not any(name.startswith("pytorch_model") for name in os.listdir(path)):
        return ": name a folder with weights as safetensors"
    return (
        f", but {_PICKLE}: a pickle, which can run any code when it is read, so we read none. If "
        'you trust it, have transformers write it as safetensors: `python -c "from transformers '
        f"import AutoModelForCausalLM as M; M.from_pretrained('{path}').save_pretrained('OUT')\"`"
    )


def _check_names(folder: Folder, stored: Mapping[str, _Stored], wanted: set[str]) -> None:
    """Refuse a tensor that is missing, or that our model has no place for."""
    path = folder.path
    if missing := sorted(wanted - stored.keys()):
        raise ConfigError(
            f"--init-from: {path} has no tensor {_some(missing)}, which a {folder.kind.model_type} "
            "of its config.json has: copy all of its files anew"
        )
    if unknown := sorted(stored.keys() - wanted - {folder.kind.head}):
        raise ConfigError(
            f"--init-from: {path} has the tensor {_some(unknown)}, which a plain "
            f"{folder.kind.model_type} has not: use the folder of a model without additions"
        )


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1} more)"


def _check_ones(stored: Mapping[str, _Stored], ones: Mapping[str, int]) -> None:
    """Refuse norms with weights, which our model has not."""
    for name, size in ones.items():
        tensor = _in_fp32(name, stored[name])
        if tensor.shape != (size,) or not bool((tensor == 1).all()):
            raise ConfigError(
                f"--init-from: {stored[name].path}: {name} is not {size} times 1, and the norms of "
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
    """Refuse another shape than config.json and the tokenizer have; `known`: it is the folder's."""
    there = tuple(stored.tensor.shape)
    if there == wanted:
        return
    if ours in ("wte.weight", "head.weight") and there[1:] == wanted[1:]:
        if there[0] > tokenizer.vocab_size and known:  # made longer, for speed: no text has these
            return
        raise ConfigError(
            f"--init-from: {stored.path}: {name} has {there[0]} tokens, and the tokenizer of the "
            f"dataset {tokenizer.vocab_size}: prepare the texts with the tokenizer.json of the "
            "model, and put that into its folder too"
        )
    if ours == "wpe.weight" and there[1:] == wanted[1:] and there[0] >= wanted[0]:
        return
    raise ConfigError(
        f"--init-from: {stored.path}: {name} is of shape {list(there)}, and config.json makes it "
        f"{list(wanted)}: the two are of different models; copy both anew"
    )


# -- a file of safetensors -------------------------------------------------------------------------


def _tensors_in(path: Path, tell: Callable[[str], None] = lambda _: None) -> dict[str, _Stored]:
    """The tensors of a file by name, by plain reads: a map of it would end the process by a signal
    where the volume takes the file away. Raises ConfigError where it is torn or none, OSError."""
    chunks = []
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            chunks.append(chunk)
            tell(f"reading {path}: {len(chunks) * _CHUNK >> 20} MiB")
    try:
        found = load(b"".join(chunks))
    except (SafetensorError, KeyError) as error:  # KeyError: of a dtype that torch has not
        raise ConfigError(
            f"{path} is torn, or no safetensors file ({error}): copy the file anew from where it "
            "came from"
        ) from None
    return {name: _Stored(path, tensor) for name, tensor in found.items()}


def _in_fp32(name: str, stored: _Stored) -> Tensor:
    """Its values. Raises ConfigError where they cannot be used."""
    path, tensor = stored
    if tensor.dtype not in _FLOATS:
        raise ConfigError(
            f"{path}: {name} is of {tensor.dtype}: use float32, float16 or bfloat16; others, as of "
            "quantized weights, have to be converted first"
        )
    tensor = tensor.float()
    if not bool(torch.isfinite(tensor).all()):
        raise ConfigError(
            f"{path}: {name} has values that are not finite (NaN or infinite): a run that begins "
            "with them has no finite step; use weights from before that"
        )
    return tensor
