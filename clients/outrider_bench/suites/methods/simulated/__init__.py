"""Parts of the methods suite that are measured in simulated time, each beside what its paper says."""
