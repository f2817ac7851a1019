"""The layers of a model on paper, from single kernels to a whole micro-batch."""
