"""The run directory, its records and the plain data of a run, for `checkpoint` and above."""
