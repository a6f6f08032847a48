"""Files that run without Python: ExecuTorch's .pte and AOTInductor's .pt2."""
