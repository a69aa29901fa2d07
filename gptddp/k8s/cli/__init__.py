"""Commands of `gptddp-k8s`, one module per group; only the program imports them."""
