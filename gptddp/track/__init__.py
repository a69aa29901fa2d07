"""Trackers (W&B, trackio, TensorBoard), fed from the log of a run."""
