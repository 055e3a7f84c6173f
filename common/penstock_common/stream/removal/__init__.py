"""How epochs, streams and files that no stream has are removed."""
