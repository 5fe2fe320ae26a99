"""A model on a CPU: kernels compiled by numba, for attention, for what stands between the products of a layer, for
products of bfloat16, and for draws from large vocabularies.
"""
