"""Kernels in Triton that both GPU platforms share. Importing a module here imports triton."""
