"""What an expert would look at before and while a server carries streams: pure rules from facts to findings."""
