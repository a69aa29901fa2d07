"""From text to a dataset on disk. Only `cli` imports it: nothing that trains does."""
