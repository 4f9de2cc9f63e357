"""Run a command without a network: ``python -m tools.offline make docs``.

The operating system gives the command a network of its own (a namespace of Linux) in which there is only the interface
over which programs on the same machine talk to each other, as notebooks and their kernels do. Everything that the
command starts is in there, too. Ends with the command's exit status, or with 125 where the system does not allow this.
"""

import argparse
import fcntl
import os
import shutil
import socket
import struct
import subprocess
import sys

REFUSED = 125
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1  # from Linux' headers sockios.h and if.h


def unshare_command() -> list[str]:
    """What makes a network namespace: who is not root becomes root in a user namespace for that."""
    return ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--net"]


def why_not() -> str | None:
    """Why this system cannot do it, in a sentence; None if it can."""
    if not (sys.platform == "linux" and shutil.which("unshare")):
        return "Network namespaces need Linux and the command unshare."
    tried = subprocess.run([*unshare_command(), "true"], capture_output=True, text=True)
    return f"This system allows no network namespace: {tried.stderr.strip()}" if tried.returncode else None


def bring_loopback_up() -> None:
    """Switch the interface lo on, which is off in a new namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh14x", b"lo", 0)
        (flags,) = struct.unpack("16xh14x", fcntl.ioctl(any_socket, SIOCGIFFLAGS, request))
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | IFF_UP))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="a command and its arguments")
    arguments = parser.parse_args()
    if not arguments.command:
        parser.error("give a command")
    if arguments.inside:
        bring_loopback_up()
        os.execvp(arguments.command[0], arguments.command)
    if reason := why_not():
        print(reason, file=sys.stderr)
        return REFUSED
    command = [*unshare_command(), sys.executable, "-m", "tools.offline", "--inside", *arguments.command]
    os.execvp(command[0], command)


if __name__ == "__main__":
    sys.exit(main())
