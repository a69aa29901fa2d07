"""What a pod runs: torchrun with warm workers, in a loop. Of it, `k8s` reads `launch.pod`."""
