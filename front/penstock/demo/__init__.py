"""The demo: `script` uses the public names as a user would, and `command` is ``penstock demo`` around it."""
