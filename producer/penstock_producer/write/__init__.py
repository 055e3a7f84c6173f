"""The package that writes: writer, shards, commit, admission, retention, and the import of exported epochs."""
