"""Observes a job on a cluster (state, causes, logs), for `k8s.act` and `k8s.cli`."""
