"""Worker processes: taking jobs, making samples, being watched over, and how many there should be."""
