"""Bytes on disk: safetensors files, config.json, and replacing a file or a directory in one step."""
