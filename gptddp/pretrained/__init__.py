"""Models as Hugging Face's transformers keeps them: their names by kind, their folders."""
