"""The methods over networks: what distance and loss leave of their speed: `outrider bench network`."""
