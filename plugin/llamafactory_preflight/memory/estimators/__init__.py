"""Whole runs on paper: on one GPU, under DeepSpeed, under FSDP, and without training."""
