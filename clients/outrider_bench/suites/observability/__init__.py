"""The cost of metrics and traces: services that differ in nothing else take turns."""
