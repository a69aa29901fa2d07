"""A slow link: `delayed_link.py ONE OTHER SECONDS` passes frames between two devices, late.

For kernels without netem. It prints `ready` when it works, and ends with its standard input.
"""

import collections
import select
import socket
import sys
import time

SOL_PACKET, PACKET_VNET_HDR, SO_RCVBUFFORCE, ETH_P_ALL = 263, 15, 33, 3
FRAME_BYTES = 1 << 17  # more than any frame: veth passes on uncut segments of 64 KiB


def wire(device: str) -> socket.socket:
    """A socket for all frames of a device; each begins with the kernel's offload header.

    The header is sent too, as frames without segmentation or checksum would be lost otherwise.
    """
    it = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
    it.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    it.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 1 << 24)
    it.bind((device, ETH_P_ALL))
    return it


def main(one: str, other: str, seconds: float) -> None:
    a, b = wire(one), wire(other)
    across = {a: b, b: a}
    late: collections.deque[tuple[float, socket.socket, bytes]] = collections.deque()
    print("ready", flush=True)
    while True:
        wait_s = max(0.0, late[0][0] - time.monotonic()) if late else None
        ready = select.select([a, b, sys.stdin], [], [], wait_s)[0]
        if sys.stdin in ready:
            return
        for it in ready:
            frame, (_, _, kind, *_) = it.recvfrom(FRAME_BYTES)
            if kind != socket.PACKET_OUTGOING:
                late.append((time.monotonic() + seconds, across[it], frame))
        while late and late[0][0] <= time.monotonic():
            _, to, frame = late.popleft()
            to.send(frame)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
