"""What every service shares: the wire, errors, rpc, blobs, sessions. Imports no service."""
