"""Talking to a server: control client, data channels, the protocol, failures in our words."""
