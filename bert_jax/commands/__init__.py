"""The `bert-jax` command: flags, help, printing."""
