"""Other ways to feed a training, each run as it is meant to be, so that none of them becomes a dependency.

One file is one peer: a program for child processes (``PYTHON -m benchmarks.peers.NAME``) that speaks ``protocol`` and
imports nothing of Penstock's, so that it runs in an environment of its own (``environments``). ``ours`` is Penstock by
the same protocol. Where a peer can be used well or badly, its file says which was chosen, and why.
"""
