"""Watching streams: rates, what holds a stream up, metrics. Pure but for the exporter; screens are the command's."""
