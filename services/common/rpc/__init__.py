"""gRPC servers, channels and status mapping, with the project's defaults."""
