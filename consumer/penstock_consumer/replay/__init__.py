"""Reading kept epochs without a group: in passes, from files, by identity, and out to files."""
