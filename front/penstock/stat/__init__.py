"""Statistics of samples as they stream by: pure, bounded in memory, mergeable. No Redis, no printing, no drawing."""
