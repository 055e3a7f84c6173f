"""The chaos suite: a whole Penstock under random kills, stops and restarts, and a checker that counts every sample.

``python -m chaos`` (or ``make chaos``) runs it; docs/internals/chaos.md says what it does and what it proves.
Nothing here is installed with the package.
"""
