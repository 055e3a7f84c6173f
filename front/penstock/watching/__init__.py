"""Rates, the limit of a stream, and metrics. Pure except for the exporter. The command draws the screens."""
