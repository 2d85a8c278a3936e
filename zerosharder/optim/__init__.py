"""Taking over a torch optimizer: its parameters, its state, and steps over the flat shards."""
