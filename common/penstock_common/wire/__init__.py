"""Wire format v1 as pure functions: dtypes, specs, blocks, entries, segment files. No Redis, clock or disk.

docs/wire-format.md and the corpus in tests/golden define the format. This package is one implementation of it.
"""
