"""Shared reading: members of a group compete for entries, hold them by leases, and take over from the dead."""
