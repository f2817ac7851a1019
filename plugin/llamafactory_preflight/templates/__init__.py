"""What the chat templates of the Qwen3 family do, and how LLaMA-Factory's differ. Pure: no torch, no transformers."""
