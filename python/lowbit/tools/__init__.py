"""Tools that measure, apart from what runs models."""
