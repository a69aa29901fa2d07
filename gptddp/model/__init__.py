"""The model, its loss, optimizer and evaluation, for `training`, `train` and what reads a model."""
