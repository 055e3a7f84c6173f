"""What producer and consumer must agree on: errors, settings, the wire format, and the one room that speaks Redis.

A module lives here only if both sides reach it.
"""
