"""How samples enter a stream: the Writer, its shards, the commit, and room in the budget."""
