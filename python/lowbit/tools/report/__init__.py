"""``lowbit report``: quality, bytes and speed of a model at each bit width and method, as figures and a page of plots."""
