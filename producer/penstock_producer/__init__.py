"""Everything that makes entries: the one writer, its plans (back-pressure, retention), the jobs and the sources.

Nothing here reads a stream back or knows a training framework; the consumer package is never imported.
"""
