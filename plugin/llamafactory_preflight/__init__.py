"""Memory preflight, proven presets and a Qwen3 template fixer for LLaMA-Factory."""

__version__ = "0.1.0"
