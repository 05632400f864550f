"""Subcommands of `bert-jax`, one a file: `add_arguments` adds its flags, `run` runs it."""
