"""The network interfaces of this host."""

from __future__ import annotations

import fcntl
import socket
import struct


def interfaces() -> dict[str, str]:
    """Name → IPv4 address of this host's network interfaces that have one."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(sock, 0x8915, request)  # SIOCGIFADDR
            except OSError:  # it has no IPv4 address
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def outer_addresses() -> list[str]:
    """The addresses at which other hosts may reach this one."""
    return [address for address in interfaces().values() if not address.startswith("127.")]
