"""Quantizing a model in memory, and training what will be quantized."""
