"""PyTorch models with 1- to 8-bit weights, fast on Arm and x86 CPUs."""
