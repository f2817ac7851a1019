"""What this machine offers a run: main memory, disk, processes and their GPUs."""
