"""Presets and optimizers: the values that they give to fields; values that cannot be combined."""

import math
from typing import Any

# Shapes of GPT-2 (Radford et al. 2019, table 2). Peak learning rates of GPT-3 at the same sizes
# (Brown et al. 2020, table 2.1), which is also its batch of 0.5 M tokens. `tiny` is ours: a step
# of 12 k tokens, a fraction of a second on two cores. `modern` and `modern-tiny` have the parts of
# Qwen 3 (2025), but for weights of norms, in these two shapes. `autoresearch` is the model, context
# and batch of github.com/karpathy/autoresearch at its depth of 8.
_ROWS: dict[str, Any] = dict(pack="best-fit", mask="none")
_GPT2: dict[str, Any] = dict(
    **_ROWS,
    n_layer=12, n_head=12, n_embd=768, seq_len=1024, lanes=48, batch=480, micro_batch=10,
    steps=20_000, lr=6e-4, warmup_steps=700, eval_every=250, eval_tokens=2**20,
)  # fmt: skip
_MODERN: dict[str, Any] = dict(
    norm="rmsnorm", positions="rope", activation="swiglu", qk_norm="rmsnorm", head="tied",
)  # fmt: skip
_TINY: dict[str, Any] = dict(
    **_ROWS,
    n_layer=4, n_head=4, n_embd=128, seq_len=256, lanes=12, batch=48, micro_batch=4,
    steps=400, lr=3e-3, warmup_steps=40, eval_every=100, eval_tokens=2**16,
)  # fmt: skip
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": _TINY,
    "gpt2": _GPT2,
    "gpt2-medium": {**_GPT2, "n_layer": 24, "n_head": 16, "n_embd": 1024, "lr": 3e-4},
    "gpt2-large": {**_GPT2, "n_layer": 36, "n_head": 20, "n_embd": 1280, "lr": 2.5e-4},
    "gpt2-xl": {**_GPT2, "n_layer": 48, "n_head": 25, "n_embd": 1600, "lr": 2e-4},
    "modern-tiny": {**_TINY, **_MODERN, "kv_heads": 2},
    "modern": {**_GPT2, **_MODERN, "kv_heads": 4},
    "autoresearch": dict(
        **_ROWS,
        n_layer=8, n_head=4, n_embd=512, seq_len=2048, lanes=32, batch=256, micro_batch=8,
        norm="rmsnorm", positions="rope", activation="relu2", qk_norm="rmsnorm",
        head="untied", softcap=15.0, windows="SSSL", extras="autoresearch",
        steps=1000, lr=1e-3, warmup_steps=0, eval_every=250, eval_tokens=40 * 2**19,
        optimizer="autoresearch",
    ),
}  # fmt: skip

# Fields for which an optimizer overrides the preset, which is tuned for AdamW. `autoresearch`: the
# constants of that trainer; its groups are in gptddp/model/recipes.py. Muon's updates are as large
# as AdamW's, so it overrides nothing, except where its peak rate was measured.
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "muon": {},
    "autoresearch": dict(
        lr=0.04, final_lr=0.0, warmup_steps=0, schedule="wsd", warmdown=0.5,
        weight_decay=0.2, betas=(0.8, 0.95), grad_clip=0.0,
    ),
}  # fmt: skip

MEASURED: dict[tuple[str, str], dict[str, Any]] = {  # by benchmarks/optimizers.py
    ("muon", "tiny"): dict(lr=1.2e-2),
    ("muon", "modern-tiny"): dict(lr=1.2e-2),
}
# The peak rate of fine-tuning is that of pre-training divided by this. Radford et al. 2018 (GPT,
# section 4.1) divided by 4, nanoGPT by 20.
FINE_TUNING = 10

# `depth` follows github.com/karpathy/nanochat (scripts/base_train.py at 92d63d4).
_WIDTH = 64  # channels per block, as in nanochat
_TOKENS = 20  # per parameter of the blocks; Hoffmann et al. 2022, table 3, count all parameters
_BATCH = 0.383  # the best batch grows with tokens**0.383 (Bergsma et al. 2025), as in nanochat

_GPT2S = ("tiny", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")  # by width

# The fields that select the parts of a model. kv_heads is not here, as its default is n_head.
PARTS = ("norm", "positions", "activation", "qk_norm", "head", "softcap", "windows", "extras")


def given_by(preset: str, optimizer: str | None) -> dict[str, Any]:
    """Fields set by preset and optimizer; None: the preset's own optimizer, or AdamW."""
    given = PRESETS[preset]
    optimizer = optimizer or given.get("optimizer", "adamw")
    return given | OPTIMIZERS[optimizer] | MEASURED.get((optimizer, preset), {})


def scaled(preset: dict[str, Any], c: Any) -> dict[str, Any]:  # c: see wrong_shape
    """Fields set by `depth`: the preset with more or fewer blocks and heads of the same size.

    Fields that are given are used in the computation. At the depth of `gpt2`, `modern` and
    `autoresearch` only the length of the run differs from the preset.
    """
    size = preset["n_embd"] // preset["n_head"]
    width = c.n_embd or math.ceil(_WIDTH * c.depth / size) * size
    heads = c.n_head or max(1, width // size)
    groups = range(1, (preset["kv_heads"] or heads) + 1)
    blocks = 12 * (c.n_layer or c.depth) * width**2  # parameters, as GPT-2 has them
    grown = blocks / (12 * preset["n_layer"] * preset["n_embd"] ** 2)
    seq_len, lanes = c.seq_len or preset["seq_len"], c.lanes or preset["lanes"]
    rows = preset["batch"] * preset["seq_len"] / seq_len * grown**_BATCH
    batch = c.batch or max(1, round(rows / lanes)) * lanes
    steps = c.steps or math.ceil(_TOKENS * blocks / (batch * seq_len))
    # AdamW's rate falls as the width grows, as in GPT-3's table (Yang et al. 2022, "Tensor programs
    # V"). The Muon of autoresearch already scales by the width.
    own_rate = (c.optimizer or preset["optimizer"]) == "autoresearch"
    return dict(
        n_layer=c.depth, n_head=heads, n_embd=width, batch=batch, steps=steps,
        kv_heads=max(n for n in groups if heads % n == 0),
        lr=preset["lr"] * (1 if own_rate else preset["n_embd"] / width),
        warmup_steps=min(preset["warmup_steps"], steps // 10),
    )  # fmt: skip


def fine_tuning_rate(n_embd: int, optimizer: str | None) -> float:
    """The peak rate for trained weights of this width: from the smallest GPT-2 that is as wide.

    The run's own preset is no guide: on CPUs it is `tiny`, whose rate would ruin a larger model.
    """
    wide = [it for it in _GPT2S if PRESETS[it]["n_embd"] >= n_embd] or ["gpt2-xl"]
    return float(given_by(wide[0], optimizer)["lr"] / FINE_TUNING)


def wrong_shape(c: Any) -> str:  # a Config, whose module imports this one
    """Why some fields cannot be combined, with the rule and a fix; "": all set fields fit."""
    if c.batch and c.lanes and c.batch % c.lanes:
        low = c.batch // c.lanes * c.lanes
        fix = f"{low} or {low + c.lanes}" if low else f"{c.lanes}"
        return (
            f"batch {c.batch} is not divisible by lanes {c.lanes}: use a batch of {fix}, "
            f"or lanes that divide {c.batch}"
        )
    if c.n_embd and c.n_head and c.n_embd % c.n_head:
        near = max(c.n_head, c.n_embd // c.n_head * c.n_head)
        return (
            f"n_embd {c.n_embd} is not divisible by n_head {c.n_head}: "
            f"use {near} or {near + c.n_head}"
        )
    if c.kv_heads and c.n_head and c.n_head % c.kv_heads:
        heads = max(n for n in range(1, min(c.kv_heads, c.n_head) + 1) if c.n_head % n == 0)
        return (
            f"n_head {c.n_head} is not divisible by kv_heads {c.kv_heads}: each key and value "
            f"head serves the same number of query heads; use --kv-heads {heads}"
        )
    if c.positions == "rope" and c.n_embd and c.n_head and (size := c.n_embd // c.n_head) % 2:
        return (
            f"positions is rope, which rotates pairs, and a head has {size} channels: "
            f"use --n-embd {c.n_embd + c.n_head}, or another n_head"
        )
    if c.windows is not None and (not c.windows or set(c.windows) - set("SL")):
        return (
            f"windows is {c.windows[:60]!r}: use a pattern of S (half a row) and L (all of it), "
            "such as SSSL, or L"
        )
    if c.extras == "autoresearch" and c.head == "tied":
        return (
            "extras autoresearch starts with embeddings far too large for a tied output layer: "
            "use --head untied"
        )
    return ""
