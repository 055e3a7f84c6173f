"""Entries on their way from the server into the rows of batches."""
