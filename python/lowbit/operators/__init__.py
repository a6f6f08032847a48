"""The operators, as Python calls them."""
