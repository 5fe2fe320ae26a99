"""All methods on the demo pair, and what each paper claims for its own: `outrider bench methods`."""
