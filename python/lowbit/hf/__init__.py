"""Integration with transformers. Only modules here use what transformers does not document."""

import transformers

if transformers.__version__.split(".")[0] != "5":  # the oldest and the newest 5.x are tested
    raise ImportError(f"found transformers {transformers.__version__}; expected 5.0.0 or later, below 6")
