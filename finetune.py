"""`python finetune.py` is the command `bert-jax finetune`; `--help` explains it."""

from bert_jax.commands.main import main

if __name__ == "__main__":
    main("finetune")
