"""Round-to-nearest quantization of a model in memory."""
