"""Subcommands of `bert-jax`, one a file: their flags, help and printing."""
