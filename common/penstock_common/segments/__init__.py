"""Segment files on a disk: a stream's folder, writing, reading, using again. ``wire.segment`` has the layout."""
