"""Simulates a cable between two network namespaces, with a latency and a speed. Needs root and /dev/net/tun.

    ip netns exec FIRST python cable.py FIRST_ADDRESS SECOND SECOND_ADDRESS DELAY_MS MBIT

Makes an interface `eth0` in each namespace and forwards packets between them, each DELAY_MS after the time that it takes on a
line of MBIT million bits per second. `tc netem` does the same, but not every Linux kernel has it.
"""

import ctypes
import fcntl
import os
import queue
import struct
import subprocess
import sys
import threading
import time

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI, _CLONE_NEWNET = 0x400454CA, 1, 0x1000, 0x40000000
_MTU = 1500


def interface(address: str) -> int:
    """Makes `eth0` in this process's namespace; returns the file for its packets."""
    tun = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", b"eth0", _IFF_TUN | _IFF_NO_PI))
    for command in (f"addr add {address}/24 dev eth0", f"link set eth0 mtu {_MTU} txqueuelen 10000 up"):
        subprocess.run(["ip", *command.split()], check=True)
    return tun


def enter(namespace: str) -> None:
    handle = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(handle, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")
    os.close(handle)


def carry(source: int, target: int, delay: float, bytes_per_second: float) -> None:
    """Forwards one direction until the process ends."""
    line: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()

    def deliver() -> None:
        while True:
            due, packet = line.get()
            wait = due - time.monotonic()
            if wait > 0:
                time.sleep(wait)
            os.write(target, packet)

    threading.Thread(target=deliver, daemon=True).start()
    free = 0.0  # when the line has sent the earlier packets
    while True:
        packet = os.read(source, _MTU + 100)
        free = max(free, time.monotonic()) + len(packet) / bytes_per_second
        line.put((free + delay, packet))


def main() -> None:
    address, other, other_address, delay, megabits = sys.argv[1:]
    first = interface(address)
    enter(other)
    second = interface(other_address)
    sys.setswitchinterval(1e-4)  # so that none of the four threads waits long
    options = float(delay) / 1e3, float(megabits) * 1e6 / 8
    threading.Thread(target=carry, args=(second, first, *options), daemon=True).start()
    carry(first, second, *options)


main()
