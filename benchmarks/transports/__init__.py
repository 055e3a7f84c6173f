"""The ways of samples from a producer to a trainer: one file for each, used as its authors intend.

A file is a program for child processes (``PYTHON -m benchmarks.transports.NAME``) with ``write(load, turns)`` and
``read(load, turns)``, or one of them. The time before the first turn is not counted. Files of peers import nothing of
Penstock's, so that they run in separate environments (``peers.environments``).
"""
