"""A run's tensors on disk and in shared memory, whole or absent, for `training` and above."""
