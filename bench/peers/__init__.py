"""The contenders of bench/compare.py: one module per library, each with contenders() as described in contender.py."""
