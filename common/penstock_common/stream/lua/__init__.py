"""The Lua of every script, one file a subject: short, ids and counters only, and no key that was not given."""
