"""What a train step costs: `bert-jax plan` for any devices, `bert-jax benchmark` on these."""
