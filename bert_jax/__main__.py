"""`python -m bert_jax`, which is the `bert-jax` command."""

from bert_jax.commands.main import main

main()
