"""From a job's specification to Kubernetes objects, pure functions. For the rest of `k8s`."""
