"""What metrics and traces cost a generation: services that differ in nothing else take turns."""
