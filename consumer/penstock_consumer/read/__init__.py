"""One path for reading: from joining a group over receiving entries to acknowledging batches."""
