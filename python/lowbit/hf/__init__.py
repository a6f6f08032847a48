"""The only place that touches what transformers does not document. ``import lowbit.transformers`` registers it."""
