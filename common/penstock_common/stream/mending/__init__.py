"""Bad samples and entries: how they are noted, given again, put back or discarded."""
