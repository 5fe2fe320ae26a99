"""The retrieval datastore, beside its targets and what the machine could do: `outrider bench datastore`."""
