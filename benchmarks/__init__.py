"""The benchmarks: they measure Penstock's speed as ratios from interleaved rounds of one run, never as single times.

Run them with ``python -m benchmarks`` (``make bench``). The tests check correctness.
"""
