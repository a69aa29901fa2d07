"""The model, its loss, optimizer and evaluation. For `training`, `train` and what reads a model."""
