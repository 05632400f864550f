"""A trained model applied to texts: embeddings, masked tokens, predictions, an index."""
