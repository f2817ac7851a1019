"""What happens while a training runs: memory measured by phase, and an answer where it runs out."""
