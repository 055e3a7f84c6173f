"""From entries to batches: one stage, one file (shuffle, batch, prefetch).

A stage takes an iterator and gives one. No Redis and no framework here; reading and acknowledging live in the loader.
"""
