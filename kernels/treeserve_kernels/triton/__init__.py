"""Triton kernels, each with the signature of its torch twin. Importing a module here imports Triton."""
