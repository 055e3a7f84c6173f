"""Segment files on a disk: a stream's folder, writing, reading, using again. The layout is ``format.segment``'s."""
