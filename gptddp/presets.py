"""The models and the optimizers by name: the values that they give to fields of a configuration."""

from typing import Any

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
        n_layer=4, n_head=4, n_embd=128, seq_len=256, lanes=12, batch=48, micro_batch=4,
        steps=400, lr=3e-3, warmup_steps=40, eval_every=100, eval_tokens=2**16,
    ),
    "gpt2": _GPT2,
    "gpt2-medium": {**_GPT2, "n_layer": 24, "n_head": 16, "n_embd": 1024, "lr": 3e-4},
    "gpt2-large": {**_GPT2, "n_layer": 36, "n_head": 20, "n_embd": 1280, "lr": 2.5e-4},
    "gpt2-xl": {**_GPT2, "n_layer": 48, "n_head": 25, "n_embd": 1600, "lr": 2e-4},
}  # fmt: skip

# What an optimizer gives to fields instead of the preset, whose values are AdamW's. `autoresearch`:
# the constants of that trainer; its groups are in gptddp/model/recipes.py.
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "muon": {},
    "autoresearch": dict(
        lr=0.04, final_lr=0.0, warmup_steps=0, schedule="wsd", warmdown=0.5,
        weight_decay=0.2, betas=(0.8, 0.95), grad_clip=0.0,
    ),
}  # fmt: skip
