"""The machine: threads, memory, child processes."""
