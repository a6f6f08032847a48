"""``lowbit doctor``: facts about this machine, and a trial of each way to run a model."""
