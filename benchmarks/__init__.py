"""Where Penstock's speed is measured: ratios from interleaved rounds of one run, never single times.

``python -m benchmarks`` (``make bench``). Correctness is the tests' business.
"""
