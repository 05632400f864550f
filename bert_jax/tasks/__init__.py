"""The kinds of task that BERT is fine-tuned on, a module each. NumPy alone, but for the heads."""
