"""A pod for clients that are told of no proxy: this process in a network namespace of its own, the tools in another.

A cable joins the two. Names lead to the other end through a hosts file that only this process and its children see.
Nothing has a default route, so that what is not redirected and not the tools' has nowhere to go. All of this takes root.
"""

import ctypes
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path

# The user that hedgerow runs as in its image, by which the rules know its connections.
USER = 2747
TOOLS, TOOLS_6 = "10.77.0.1", "fd77::1"
PORTS = {"http": 80, "https": 443}

CLONE_NEWNET = 0x40000000


def run_inside(script: Path, arguments: Iterable[str]) -> int:
    """Runs the script once more, in new namespaces: its exit code. Not being able to is no success."""
    maker = ["unshare", "--net", "--mount"]
    if os.getuid() != 0:
        maker = ["sudo", "-n", "env", f"PATH={os.environ['PATH']}", *maker]
    trial = "ip link set lo up && nft add table inet trial"
    tried = subprocess.run([*maker, "sh", "-c", trial], capture_output=True, text=True)
    if tried.returncode != 0:
        print(f"no network namespace with redirect rules can be made here: {tried.stderr.strip()}")
        return 1
    return subprocess.run([*maker, sys.executable, str(script), *arguments]).returncode


class Pod:
    """The two namespaces. The other one is there as long as this object."""

    def __init__(self, names: list[str], names_6: list[str]):
        # Says when it is there, and stays until its stdin ends.
        command = ["unshare", "--net", "sh", "-c", "echo; exec cat"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.holder = subprocess.Popen(command, **pipes)
        self.holder.stdout.read(1)
        there = f"/proc/{self.holder.pid}/ns/net"
        for line in [
            "ip link set lo up",
            f"ip link add cable type veth peer name eth0 netns {self.holder.pid}",
            "ip addr add 10.77.0.2/24 dev cable",
            "ip -6 addr add fd77::2/64 dev cable nodad",
            "ip link set cable up",
            f"nsenter --net={there} ip addr add {TOOLS}/24 dev eth0",
            f"nsenter --net={there} ip -6 addr add {TOOLS_6}/64 dev eth0 nodad",
            f"nsenter --net={there} ip link set eth0 up",
        ]:
            subprocess.run(line.split(), check=True)
        with tempfile.NamedTemporaryFile("w", suffix=".hosts") as hosts:
            hosts.write("127.0.0.1 localhost\n")
            hosts.writelines(f"{TOOLS} {name}\n" for name in names)
            hosts.writelines(f"{TOOLS_6} {name}\n" for name in names_6)
            hosts.flush()
            Path(hosts.name).chmod(0o644)
            # The mount outlives the name.
            subprocess.run(["mount", "--bind", hosts.name, "/etc/hosts"], check=True)

    def listen(self, port: int) -> list[socket.socket]:
        """Sockets at the other end, for servers in this process. They stay where they were made."""
        made: list[socket.socket] = []

        def make():
            with open(f"/proc/{self.holder.pid}/ns/net") as namespace:
                libc = ctypes.CDLL(None, use_errno=True)
                if libc.setns(namespace.fileno(), CLONE_NEWNET) != 0:
                    raise OSError(ctypes.get_errno(), "setns")
            made.append(socket.create_server((TOOLS, port)))
            made.append(socket.create_server((TOOLS_6, port), family=socket.AF_INET6))

        # A thread has a namespace of its own when it wants one.
        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
        if len(made) != 2:
            raise SystemExit("no socket can be made in the other namespace")
        return made

    def redirect(self, binary: Path, port: int) -> None:
        """Sends everything that goes to the tools to hedgerow."""
        subprocess.run([binary, "redirect", "--port", str(port), "--ipv6", "on"], check=True)


def as_user(folder: Path) -> list[str]:
    """What runs a program as hedgerow's user, who may write to the folder and, since the binary may lie anywhere, read
    what root may."""
    shutil.chown(folder, USER, USER)
    capability = "+dac_read_search"
    user = [f"--reuid={USER}", f"--regid={USER}", "--clear-groups"]
    return ["setpriv", *user, f"--inh-caps={capability}", f"--ambient-caps={capability}"]
