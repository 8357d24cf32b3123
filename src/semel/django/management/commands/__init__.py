"""The commands, one in each file."""
