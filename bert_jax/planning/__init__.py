"""What a training step will cost on devices that are not here: `bert-jax plan`."""
