"""What a stream keeps and what may go: retention, recycling, tidying. Plans are pure; the janitor carries them out."""
