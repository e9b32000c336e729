"""NVIDIA GPUs: found and described; serving on them is not in this version."""
