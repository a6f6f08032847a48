"""The error of models that a decoder does not support."""


class Unsupported(ValueError):
    """A property of a model that the decoder does not support: a sentence about it, without the model's name."""
