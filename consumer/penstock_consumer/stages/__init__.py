"""Batches on their way from the reader to the training loop: the queue, the stages, and the times. No Redis here."""
