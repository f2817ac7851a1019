"""What LLaMA-Board gets from the plugin: presets, the memory panel, the template check. Runs inside LLaMA-Factory."""
