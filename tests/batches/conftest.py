"""Grain reads a flag, which commands parse."""

from absl import flags

flags.FLAGS.mark_as_parsed()
