"""A PyTorchJob on this machine, a process a pod. For `k8s.cli`."""
