"""What a run's data sets hold: how long their samples are, and their images."""
