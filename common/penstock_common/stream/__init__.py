"""The only room that imports redis: keys, connections, commands, scripts and the embedded server.

Replies and redis-py exceptions are translated here. Deciding what to send (plans, policies, waiting) lives with the
producer and the consumer; the bytes of an entry live in ``penstock_common.wire``.
"""
