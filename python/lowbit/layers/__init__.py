"""Which layers of a model can be packed, and what replaces them."""
