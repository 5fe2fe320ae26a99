"""What the papers claim of their methods, measured on the demo pair in simulated time: `outrider bench papers`."""
