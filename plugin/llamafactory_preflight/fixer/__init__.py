"""Repairs the chat template in a running LLaMA-Factory. Loaded only from its hooks."""
