"""What each width and method costs a model in quality and gains in bytes and speed: figures, and a page of plots."""
