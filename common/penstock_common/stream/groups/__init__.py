"""Groups and their members: rosters, ledgers, positions, pins."""
