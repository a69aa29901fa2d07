"""The run directory, its books, and the plain data of a run. For `checkpoint` and above."""
