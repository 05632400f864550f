"""A run of pretraining or of fine-tuning, from its settings to its results."""
