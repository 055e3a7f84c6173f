"""Being a member of a group: arriving, showing that one lives, and ending."""
