"""All that knows how transformers works inside."""
