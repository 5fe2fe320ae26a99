"""The `outrider` command, and the services on one machine that it starts."""

import os

# gRPC's own lines about connections that end would land between ours. It reads this when it is imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
