"""``penstock bench``: the reader's own source through a DataLoader and through Penstock, in turns, and which to use.

``feeds`` has the two ways by which a trainer without Penstock gets batches, ``turns`` runs and times the processes of
one turn, ``verdict`` judges what was measured. Only ``feeds`` knows torch, only ``turns`` knows processes.
"""
