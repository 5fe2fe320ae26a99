"""A model on a CPU: kernels compiled by numba for attention, for the steps between the products of a layer, for small
and bfloat16 products, and for draws from large vocabularies.
"""
