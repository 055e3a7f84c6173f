"""Where samples come from: one file per kind of source, all with the same small protocol.

Decoding images, opening archives and calling user code live here. Redis, RQ and the packing of entries do not.
"""
