"""The commands of `gptddp-k8s`, a module a group of them. Nothing imports it but the program."""
