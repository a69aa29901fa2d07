"""The model, its loss, optimizer and evaluation."""
