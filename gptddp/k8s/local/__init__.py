"""A PyTorchJob on this machine, a process a pod, for `k8s.cli`."""

from pathlib import Path

LOCAL_DIR = Path("gptddp-local")  # where --local-dir is not given
