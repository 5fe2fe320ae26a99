"""A model on a CPU: kernels compiled by numba, for attention, for what stands between the products of a layer, for
small products and those of bfloat16, and for draws from large vocabularies.
"""
