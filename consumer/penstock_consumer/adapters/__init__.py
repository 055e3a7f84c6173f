"""One file per training framework, each with the same verbs.

An adapter turns a loader into what the framework's own training loop takes and acknowledges from the step. Each module
imports its own framework only, so importing this package loads none.
"""
