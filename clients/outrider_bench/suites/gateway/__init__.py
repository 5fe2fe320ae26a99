"""The suite of the gateway: what HTTP costs beside gRPC, and how soon it begins and ends."""
