"""The ranks and their processes: environment, group, hardware and peers."""
