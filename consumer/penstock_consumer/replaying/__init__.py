"""Epochs that are kept, read without a group: again, from files, by identity, out to files."""
