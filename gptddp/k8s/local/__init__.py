"""A PyTorchJob on this machine, a process a pod, for `k8s.cli`."""
