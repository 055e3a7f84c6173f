"""Talking to a server: control client, data channels, the protocol, error translation. It knows no stream."""
