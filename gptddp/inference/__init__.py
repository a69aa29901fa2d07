"""What a trained model is for: text from it, its loss on a dataset, its weights for others."""
