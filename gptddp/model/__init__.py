"""The model, its loss, optimizer and evaluation; training and inference use it."""
