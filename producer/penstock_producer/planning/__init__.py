"""What is to be made and how far it is: productions, their epochs and shards, the queue, the folder that is watched."""
