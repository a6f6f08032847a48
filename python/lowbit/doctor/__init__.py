"""`lowbit doctor`: what this machine has and how fast its memory is, and whether each way to run a model works here."""
