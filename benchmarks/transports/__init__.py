"""How samples get from who makes them to who trains on them: one file for each way, each used as it is meant to be.

A file is a program for child processes (``PYTHON -m benchmarks.transports.NAME``): ``write(load, turns)`` and
``read(load, turns)``, or what of them it has. What comes before the first turn is nobody's time. Files of peers import
nothing of Penstock's, so that they run in environments of their own (``peers.environments``).
"""
