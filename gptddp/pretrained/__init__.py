"""Models in the format of Hugging Face's transformers: folders, and parameter names by kind."""
