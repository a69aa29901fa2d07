"""Acts on jobs on a cluster (submit, change, delete, short Jobs), for `k8s.cli`."""
