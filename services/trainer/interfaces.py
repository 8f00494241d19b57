"""Which of this machine's addresses the group should use, where it has several."""

import contextlib
import fcntl
import socket
import struct

SIOCGIFADDR = 0x8915
IFREQ_BYTES = 256


def towards(address: str) -> str:
    """The local IPv4 address from which `address` (host:port, with or without http://) is reached; OSError if none."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    family, kind, _, _, where = socket.getaddrinfo(host, int(port), socket.AF_INET, socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        # a datagram socket that connects sends nothing; the kernel only chooses the route
        probe.connect(where)
        return str(probe.getsockname()[0])


def interface(address: str) -> str:
    """Name of the network interface that has this IPv4 address; "" if none has."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # one without an address
                request = struct.pack(f"{IFREQ_BYTES}s", name.encode()[:15])
                found = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return ""
