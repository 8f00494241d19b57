"""The scheduler's gRPC services: one file each, and the conversion between contract and model."""
