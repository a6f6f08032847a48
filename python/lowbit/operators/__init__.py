"""Python functions for lowbit's operators, and the compiled library that provides them."""
