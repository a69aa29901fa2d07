"""How well a trained model knows a dataset: `gptddp eval`."""

from pathlib import Path
from typing import Any, Literal

from gptddp.data.dataset import open_dataset
from gptddp.data.loader import eval_rows
from gptddp.distributed.connect import connect
from gptddp.distributed.hardware import use
from gptddp.inference.load_model import load_for
from gptddp.model.evaluate import evaluate


def evaluate_model(
    path: Path, data: str, split: Literal["train", "val"], step: int | None, tokens: int | None
) -> dict[str, Any] | None:
    """All ranks of a torchrun, or one process: the report on rank 0, None on others.

    `path`: a run directory or a folder of Hugging Face's. `step`: of a checkpoint; None: the newest
    valid one. `tokens`: about so many, the same at each call; None: the whole split. It computes as
    the run does, so the bits are those of the run's own evaluations, at any world size. In the
    report loss is in nats a token, bpb in bits a byte or None. Raises GptddpError, OSError.
    """
    dataset = open_dataset(data, "fail")
    with connect(None) as world:
        net, config, at = load_for(path, dataset, step, world.device)
        use(config, world.device)
        most = tokens if tokens is not None else 1 << 62
        rows = eval_rows(dataset, config.seq_len, most, config.pack, split)
        result = evaluate(net, rows, dataset.tokenizer(), config, world)  # all ranks
        assert result is not None  # nobody asks for a stop
    if world.rank:
        return None
    report: dict[str, Any] = {"model": str(path), "step": at, "dataset": data, "split": split}
    numbers = {"loss": result.loss, "bpb": result.bpb, "targets": result.targets}
    return report | numbers | {"bytes": result.n_bytes}


def as_line(report: dict[str, Any]) -> str:
    """The report in a line for people."""
    step = "" if report["step"] is None else f", step {report['step']}"
    bpb = "" if report["bpb"] is None else f", {report['bpb']:.4f} bits a byte"
    return (
        f"{report['model']}{step}, on {report['split']} of {report['dataset']}: loss "
        f"{report['loss']:.4f} nats a token{bpb}; {report['targets']:,} tokens, "
        f"{report['bytes']:,} bytes"
    )
