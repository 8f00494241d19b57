"""Libra's services. They meet over gRPC only; each has a folder of its own."""
