"""Turns text into a dataset on disk; only `cli` imports this package."""
