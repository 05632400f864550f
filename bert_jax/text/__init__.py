"""Text to tokens on disk: sources, sentences, tokenizers, the token store."""
