"""The page of the gateway: its static files, and its requests besides the API."""
