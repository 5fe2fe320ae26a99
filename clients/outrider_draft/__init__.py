"""Makes a draft model for a target: `outrider draft`."""
