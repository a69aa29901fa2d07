"""What several test files use."""

# A model of 30 k parameters: a step of 8 rows takes milliseconds.
SMALL = [
    *("--n-layer", "2", "--n-head", "2", "--n-embd", "32", "--seq-len", "32"),
    *("--lanes", "8", "--batch", "8", "--micro-batch", "2", "--warmup-steps", "2"),
    *("--precision", "fp32", "--device", "cpu", "--eval-tokens", "512"),
    *("--cache-dir", "none"),
]
