"""What a pod runs, torchrun with forked workers in a loop; of it `k8s` reads `launch.pod_facts`."""
