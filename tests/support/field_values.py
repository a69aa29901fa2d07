"""Values for the fields of a configuration, none of which is a default."""

from typing import Any

from support.hf_folder import SHA256

# Two values of every field of a run. Neither is its default, with or without a GPU.
VALUES: dict[str, tuple[Any, Any]] = {
    "on_bad": ("quarantine", "fail"),
    "preset": ("gpt2-medium", "gpt2-large"),
    "depth": (1, 2),
    "n_layer": (1, 2),
    "n_head": (2, 4),
    "n_embd": (16, 32),
    "seq_len": (16, 32),
    "dropout": (0.1, 0.2),
    "init_sha256": (SHA256, "0" * 64),
    "norm": ("rmsnorm", "layernorm"),
    "positions": ("rope", "learned"),
    "activation": ("swiglu", "relu2"),
    "kv_heads": (1, 2),
    "qk_norm": ("rmsnorm", "none"),
    "head": ("untied", "tied"),
    "softcap": (15.0, 30.0),
    "windows": ("SL", "SSL"),
    "extras": ("autoresearch", "none"),
    "lanes": (2, 4),
    "batch": (4, 8),
    "pack": ("concat", "best-fit"),
    "mask": ("document", "none"),
    "micro_batch": (3, 4),
    "reduce": ("fast", "exact"),
    "optimizer": ("muon", "autoresearch"),
    "steps": (3, 5),
    "max_tokens": (300000, 400000),
    "max_time": (3000.0, 4000.0),
    "lr": (2e-3, 1e-3),
    "final_lr": (0.5, 0.25),
    "schedule": ("linear", "wsd"),
    "warmdown": (0.5, 0.8),
    "warmup_steps": (1, 2),
    "weight_decay": (0.0, 0.3),
    "betas": ((0.8, 0.9), (0.7, 0.99)),
    "grad_clip": (0.25, 0.0),
    "max_skipped": (5, 6),
    "seed": (7, 8),
    "precision": ("bf16", "fp32"),  # the first is allowed with oneDNN on every processor
    "matmul": ("onednn", "mkl"),
    "attention": ("fused", "blocks"),
    "threads": (2, 3),
    "eval_every": (2, 3),
    "eval_tokens": (200, 300),
    "log_every": (7, 8),
    "sample_tokens": (4, 5),
    "checkpoint_every": (50.0, 40.0),
    "keep": (2, 4),
    "keep_every": (4, 6),
}
FIRST = {name: first for name, (first, _) in VALUES.items()}
# Values of a possible run: weights of a folder are a GPT-2's, and do not fit these other parts.
BEGUN = FIRST | {"init_sha256": ""}
