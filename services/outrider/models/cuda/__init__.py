"""Triton kernels for NVIDIA GPUs, and the functions that launch them. Triton is imported only where a model's device is
CUDA.

A kernel computes each row by itself, with blocks whose sizes depend on the model alone. So a row's bits depend neither
on how many rows there are, nor on where its keys and values lie. No launch waits for the device, takes memory whose
size depends on data, or chooses a configuration as it runs, so every launch can be captured in a CUDA graph.
"""
