"""Exports models to files that run without Python: ExecuTorch's .pte, AOTInductor's .pt2, and GGUF for llama.cpp."""
