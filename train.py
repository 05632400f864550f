"""`python train.py` is the command `bert-jax pretrain`; `--help` explains it."""

from bert_jax.commands.main import main

if __name__ == "__main__":
    main("pretrain")
