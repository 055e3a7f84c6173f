"""Everything between a plan and a written shard: dispatch, the queue, workers, their watchdog and their number."""
