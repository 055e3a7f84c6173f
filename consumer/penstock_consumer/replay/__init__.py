"""Reading epochs that are retained, without a group: their export to files."""
