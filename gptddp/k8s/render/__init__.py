"""From a job's specification to Kubernetes objects by pure functions, for the rest of `k8s`."""
