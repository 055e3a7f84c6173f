"""``penstock bench``: the user's own source through a DataLoader and through Penstock, in turns, and which to use.

``baselines`` has the two ways to feed a trainer without Penstock, and alone knows torch. ``rounds`` runs and times the
processes of each turn, and says what their rates recommend.
"""
