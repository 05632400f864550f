"""Checkpoints of Hugging Face and of Google's BERT, both ways."""
