"""Rates, the limit of a stream, and metrics. Pure but for the exporter. The command draws the screens."""
