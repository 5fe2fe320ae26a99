"""Everything that serves: process, settings, health, streams, exports."""
