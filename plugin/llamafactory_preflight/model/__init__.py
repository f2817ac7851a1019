"""What a model is made of, read from its configuration, here or on a hub."""
