"""A run's tensors on disk and in shared memory, complete or absent; `training` and above use it."""
