"""The decision core: pure. No I/O, clock, randomness or protobuf; the same code in service and simulator."""
