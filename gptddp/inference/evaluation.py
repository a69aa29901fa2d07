"""How well a trained model knows a dataset: `gptddp eval`."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from gptddp.data.dataset import open_dataset
from gptddp.data.loader import eval_rows
from gptddp.distributed.connect import connect
from gptddp.distributed.hardware import use
from gptddp.inference.load import load_for
from gptddp.model.evaluate import Evaluation, evaluate


@dataclass(frozen=True)
class Report:
    """What was evaluated on what, and what it came to."""

    model: str
    step: int | None  # None: a folder of Hugging Face's
    dataset: str
    split: str
    result: Evaluation

    def to_json(self) -> dict[str, Any]:
        """One flat object: loss in nats a token, bpb in bits a byte or null."""
        values = asdict(self)
        result = values.pop("result")
        return values | {"bytes" if k == "n_bytes" else k: v for k, v in result.items()}

    def __str__(self) -> str:
        it, step = self.result, "" if self.step is None else f", step {self.step}"
        bpb = "" if it.bpb is None else f", {it.bpb:.4f} bits a byte"
        return (
            f"{self.model}{step}, on {self.split} of {self.dataset}: loss {it.loss:.4f} nats a "
            f"token{bpb}; {it.targets:,} tokens, {it.n_bytes:,} bytes"
        )


def evaluate_model(
    path: Path, data: str, split: Literal["train", "val"], step: int | None, tokens: int | None
) -> Report | None:
    """All ranks of a torchrun, or one process: the report on rank 0, None on others.

    `path`: a run directory or a folder of Hugging Face's. `step`: of a checkpoint; None: the newest
    valid one. `tokens`: about so many, the same at each call; None: the whole split. It computes as
    the run does, so the bits are those of the run's own evaluations, at any world size. Raises
    GptddpError, OSError.
    """
    dataset = open_dataset(data, "fail")
    with connect(None) as world:
        net, config, at = load_for(path, dataset, step, world.device)
        use(config, world.device)
        most = tokens if tokens is not None else 1 << 62
        rows = eval_rows(dataset, config.seq_len, most, config.pack, split)
        tokenizer = dataset.tokenizer()
        result = evaluate(net, rows, tokenizer, config, world)  # all ranks
        assert result is not None  # nobody asks for a stop
        return None if world.rank else Report(str(path), at, data, split, result)
