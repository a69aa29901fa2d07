"""The process of a pod: torchrun with forked workers. `k8s` imports `pod_facts` and `bundle`."""
