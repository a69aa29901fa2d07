"""Uses of a trained model: sample text, evaluate it on a dataset, export its weights."""
