"""Threads, memory, child processes, and facts about the machine."""
