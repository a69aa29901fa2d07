"""Runs a PyTorchJob on this machine, one process per pod, for `k8s.cli`."""
