"""Checkpoints of Hugging Face, read and written, and of Google's BERT, read."""
