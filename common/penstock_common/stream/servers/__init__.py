"""Servers: private ones, and the question whether a server can keep the promises."""
