"""What is done to jobs on a cluster: submit, change, delete, short Jobs. For `k8s.cli`."""
