"""The contents of a stream in Redis: keys, entries, indexes, manifests and groups, and the commands that change them.

The producer and the consumer decide what to send (plans, policies, waiting). Connections, scripts and the translation
of errors are in ``penstock_common.server``, and the bytes of an entry in ``penstock_common.wire``.
"""
