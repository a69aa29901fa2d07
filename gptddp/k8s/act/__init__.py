"""What is done to jobs on a cluster (submit, change, delete, short Jobs), for `k8s.cli`."""
