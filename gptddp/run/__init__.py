"""The run directory, its books and the plain data of a run, for `checkpoint` and above."""
