"""The only package that imports redis: keys, connections, commands, scripts and the embedded server.

Replies and redis-py exceptions are translated here. The producer and the consumer decide what to send (plans, policies,
waiting). The bytes of an entry are in ``penstock_common.wire``.
"""
