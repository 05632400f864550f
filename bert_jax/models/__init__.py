"""The encoders and the heads of tasks; knows no mesh and no files."""
