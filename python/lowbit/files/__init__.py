"""File formats and atomic writes: safetensors, GGUF, config.json, hub downloads, replacing files and directories."""
