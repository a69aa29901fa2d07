"""What a pod runs: torchrun in a loop, with a forkserver. Of it, `k8s` reads `launch.pod`."""
