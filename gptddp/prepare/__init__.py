"""Text in, a dataset on disk out. For `cli` alone; nothing that trains imports it."""
