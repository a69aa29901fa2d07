"""Exports a run's model for Hugging Face's transformers: as a GPT-2, a Llama or a Qwen 3.

OUT/model.safetensors       weights in fp32; the metadata has configuration, step and tokenizer
OUT/config.json
OUT/tokenizer.json, tokenizer_config.json    not for plain bytes, which have no such file
"""

import json
import os
import shutil
import uuid
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from gptddp.checkpoint.run_state import configuration
from gptddp.config import Config
from gptddp.data.dataset import open_dataset
from gptddp.data.tokenizer import Tokenizer
from gptddp.errors import ConfigError
from gptddp.files import fsync, read_json, write_json_atomic
from gptddp.flags import to_saved
from gptddp.inference.load_model import load
from gptddp.model.gpt import GPT
from gptddp.pretrained.folder import WEIGHTS
from gptddp.pretrained.kind import Kind, rows
from gptddp.pretrained.kinds import kind_for


def export(run: Path, out: Path, data: str | None = None, step: int | None = None) -> int:
    """Write the model of a checkpoint to the new folder `out`; returns the checkpoint's step.

    `step`: of that checkpoint; None: the newest valid one.

    It writes the whole folder or nothing, and does not change the run. Raises GptddpError if the
    model cannot be exported or `out` exists.
    """
    if out.name in ("", "..") or os.path.lexists(out):
        raise ConfigError(f"{out} exists: give another name to --export, or remove it")
    c = configuration(run)
    kind = kind_for(c)
    net, tokenizer, step = load(run, data, step)
    metadata = {
        "format": "pt",
        "step": str(step),
        "tokenizer_sha256": tokenizer.sha256,
        "gptddp_config": json.dumps(to_saved(c)),
    }
    work = out.with_name(f".{out.name}.{uuid.uuid4().hex}")
    try:
        work.mkdir(parents=True)
        save_file(weights(net, c, kind, tokenizer.vocab_size), work / WEIGHTS, metadata)
        (work / WEIGHTS).chmod(work.stat().st_mode & 0o666)  # by the umask; it was 0600
        fsync(work / WEIGHTS)
        write_json_atomic(work / "config.json", _config(kind, c, tokenizer))
        dataset = open_dataset(data or c.data, "quarantine")
        if file := dataset.manifest["tokenizer"]["file"]:
            _write_tokenizer(work, read_json(dataset.dir / file), tokenizer.bos, c.seq_len)
        os.rename(work, out)  # fails if `out` exists by now and is not an empty folder
        fsync(out.parent)
    except (OSError, SafetensorError) as error:  # safetensors raises its own for a full disk
        raise ConfigError(f"--export {out} cannot be written: {error}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return step


def weights(net: GPT, c: Config, kind: Kind, vocab_size: int) -> dict[str, Tensor]:
    """The parameters by the kind's names; embedding and head without padding rows."""
    named = {name: torch.ones(size) for name, size in kind.ones(c).items()}
    for ours, parameter in net.named_parameters():
        tensor, names = parameter.detach(), kind.names(ours)
        if ours in ("wte.weight", "head.weight"):
            tensor = tensor[:vocab_size]
        tensor = tensor.t() if kind.transposed(ours) else tensor
        parts: tuple[Tensor, ...] = (tensor,)
        if len(names) > 1:
            parts = torch.split(tensor, list(rows(tuple(tensor.shape), len(names))))
        named |= dict(zip(names, (it.contiguous() for it in parts), strict=True))
    return {it if it == kind.head else kind.prefix + it: named[it] for it in named}


def _config(kind: Kind, c: Config, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "architectures": [kind.architecture],
        "model_type": kind.model_type,
        "torch_dtype": "float32",
        "vocab_size": tokenizer.vocab_size,
        **kind.config(c),
        "bos_token_id": tokenizer.bos,
        "eos_token_id": tokenizer.bos,  # the BOS of the next document ends a document
    }


def _write_tokenizer(folder: Path, definition: Any, bos: int, seq_len: int | None) -> None:
    """Write both files. Unless the tokenizer has a post-processor, it puts BOS before a text."""
    token = next(t["content"] for t in definition["added_tokens"] if t["id"] == bos)
    if definition.get("post_processor") is None:
        first, a, b = (
            {kind: {"id": name, "type_id": 0}}
            for kind, name in (("SpecialToken", token), ("Sequence", "A"), ("Sequence", "B"))
        )
        definition["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [first, a],
            "pair": [first, a, first, b],
            "special_tokens": {token: {"id": token, "ids": [bos], "tokens": [token]}},
        }
    write_json_atomic(folder / "tokenizer.json", definition)
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": token,
        "eos_token": token,
        "model_max_length": seq_len,
    }
    write_json_atomic(folder / "tokenizer_config.json", about)
