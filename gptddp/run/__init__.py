"""The run directory, its records, and plain data of a run; `checkpoint` and above use them."""
