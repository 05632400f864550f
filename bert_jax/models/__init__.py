"""The encoder and its heads; knows no mesh and no files."""
