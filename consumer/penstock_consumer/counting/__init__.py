"""What a loader and its training loop did, and how long they waited for whom."""
