"""Text to rows: tokenizers, the token store, sentence pairs, the loader."""
