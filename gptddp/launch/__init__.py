"""The process of a pod: torchrun with forked workers in a loop. `k8s` imports `pod_facts`, `bundle`."""
