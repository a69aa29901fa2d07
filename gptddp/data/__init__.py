"""From a prepared dataset to batches: tokenizer, lanes, packing, loader. All other parts use it."""
