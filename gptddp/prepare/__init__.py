"""Text in, a dataset on disk out: imported by `cli` alone."""
