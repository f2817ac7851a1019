"""DeepSpeed's ZeRO on paper: what becomes of parameters and gradients, and what lies in main memory."""
