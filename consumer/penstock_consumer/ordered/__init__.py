"""Ordered reading: canonical order by the shard indexes, settled by one position per rank."""
