"""Wire format v1 as pure functions: dtypes, specs, blocks, entries. No Redis, clock or disk here.

The format itself is docs/wire-format.md and the corpus in tests/golden/; this is one implementation of it.
"""
