"""The commands of `gptddp-k8s`, a module a group of them, which only the program imports."""
