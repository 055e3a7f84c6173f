"""What went wrong with single samples and entries: noted, given again, put back, or let go."""
