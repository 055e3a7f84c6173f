"""The code that producer and consumer share: errors, settings, the wire format, and the packages that speak Redis.

A module lives here only if both sides use it.
"""
