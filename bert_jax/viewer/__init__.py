"""Attention as pages for a browser: views of a text, a word compared, patterns of heads."""
