"""Import and export Hugging Face checkpoints; import Google's BERT."""
