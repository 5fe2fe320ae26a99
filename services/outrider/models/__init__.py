"""Everything with tensors: the packed runner, the sampler, loading, the demo pair."""
