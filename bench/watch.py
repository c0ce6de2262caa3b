#!/usr/bin/env python3
"""What it costs to watch for changes on the host: bench/watch.py FERRY FOLDER, as root.

In FOLDER, whose file system is watched, files are made, changed, renamed and removed, with no server, with a mount of another
folder that does not watch, and with one that does, in turn. Times are medians in milliseconds, "server" is the server's CPU time.
"""
import os
import statistics
import subprocess
import sys
import time

ROUNDS = 5
FILES = 20000
TICK_MS = 1000 / os.sysconf("SC_CLK_TCK")


def work(folder, count):
    """Four changes of each file, and a removal."""
    begin = time.monotonic()
    for number in range(count):
        path = f"{folder}/{number}"
        with open(path, "wb") as file:
            file.write(b"x" * 100)
        os.chmod(path, 0o600)
        os.rename(path, path + ".new")
    for number in range(count):
        os.unlink(f"{folder}/{number}.new")
    return (time.monotonic() - begin) * 1000


def cpu_ms(pid):
    if pid is None:
        return 0
    fields = open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) * TICK_MS


class Server:
    def __init__(self, ferry, folder, watch):
        self.mount = f"{folder}/mnt"
        self.child = None
        if watch is None:
            return
        line = [ferry, "--log", "error", "mount", f"{folder}/shared", self.mount, "--foreground", "--cache", "always"]
        self.child = subprocess.Popen(line + ["--watch", watch])
        end = time.monotonic() + 60
        while not os.path.ismount(self.mount):
            assert self.child.poll() is None and time.monotonic() < end, "no mount"
            time.sleep(0.01)

    def pid(self):
        return self.child and self.child.pid

    def stop(self):
        if self.child:
            subprocess.run(["umount", self.mount], check=True)
            self.child.wait()


def measure(server, folder, count):
    before = cpu_ms(server.pid())
    took = work(folder, count)
    # What is still to be told, and what is told again.
    if server.child:
        time.sleep(3)
    return took, cpu_ms(server.pid()) - before


def main():
    ferry, folder = sys.argv[1:]
    for name in ["shared", "mnt", "beside"]:
        os.makedirs(f"{folder}/{name}", exist_ok=True)
    rows = {}
    for _ in range(ROUNDS):
        for watch in [None, "never", "always"]:
            server = Server(ferry, folder, watch)
            try:
                places = [("beside the shared folder", f"{folder}/beside"), ("in it, on the host", f"{folder}/shared")]
                if watch:
                    places.append(("through the mount", server.mount))
                for place, path in places:
                    rows.setdefault((place, watch or "no server"), []).append(measure(server, path, FILES))
            finally:
                server.stop()
    print(f"| {FILES} files made, written, chmod, renamed, removed | watch | ms | server's CPU ms |\n| --- | --- | --- | --- |")
    for (place, watch), taken in sorted(rows.items()):
        times, cpu = zip(*taken)
        print(f"| {place} | {watch} | {statistics.median(times):.0f} ({min(times):.0f} to {max(times):.0f}) | {statistics.median(cpu):.0f} |")


main()
