"""The page of the gateway: its static files, and what it asks for beside the API."""
