"""Snapshots, the monitor and backlogs say who holds what, and why a wait lasts. They read ids and counters only."""
