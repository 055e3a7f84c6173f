"""Other ways to feed a training. Each is run as its authors intend, and none becomes a dependency.

One file is one peer: a program for child processes (``PYTHON -m benchmarks.peers.NAME``) that speaks ``protocol``. It
imports nothing of Penstock's, so that it runs in a separate environment (``environments``). ``ours`` is Penstock with
the same protocol. If a peer can be used well or badly, its file says which way was chosen, and why.
"""
