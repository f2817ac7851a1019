"""PyTorch on paper: tensors with a size and a lifetime, autograd's graph, hooks on modules."""
