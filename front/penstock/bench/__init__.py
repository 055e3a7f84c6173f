"""``penstock bench``: the user's own source through a DataLoader and through Penstock, in turns, and which to use.

``feeds`` has the two ways to feed a trainer without Penstock. ``turns`` runs and times the processes of one turn.
``verdict`` judges the measurements. Only ``feeds`` knows torch, only ``turns`` knows processes.
"""
