"""Everything that reads entries: the loader, replay, reclaiming, the ledger, and the stages that make batches.

Nothing here appends to a stream; the producer package is never imported. Frameworks enter by ``adapters`` only.
"""
