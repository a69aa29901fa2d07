"""From a prepared dataset to batches (tokenizer, lanes, packing, loader), for every part above."""
