"""`python -m bert_jax.commands`, which is the `bert-jax` command of this Python."""

from bert_jax.commands.main import main

if __name__ == "__main__":
    main()
