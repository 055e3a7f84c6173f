"""The state of a stream for people and tools: sizes, progress, and what workers and trainers report."""
