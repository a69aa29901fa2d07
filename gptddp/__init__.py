"""Pre-train GPT language models with PyTorch DDP, on pods that may be killed at any moment."""

import os

__version__ = "0.2.0"

# OpenMP reads this when torch is loaded, and this file is the only one that is sure to run before.
# By default its threads spin while they wait, against the threads that prepare the next batch:
# on two cores a step took 8 to 25 times as long as with threads that sleep (1.2 to 4.1 k tokens/s
# against 32 k), and twice as long beside another busy process.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
