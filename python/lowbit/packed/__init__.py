"""Packed matrices: headers, rounding to them, cutting and joining them."""
