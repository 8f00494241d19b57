"""The commands of `libra`, by what they do."""
