"""A server between browsers and Redis: members of groups read and acknowledge over WebSocket and HTTP."""
