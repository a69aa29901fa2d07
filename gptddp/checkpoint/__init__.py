"""A run's tensors on disk and in shared memory, whole or absent. For `training` and above."""
