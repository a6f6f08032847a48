"""The error for models that a decoder does not support."""


class Unsupported(ValueError):
    """The decoder does not support a property of the model; the message describes it without the model's name."""
