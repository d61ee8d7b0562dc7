#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Takes all free huge pages of 2 MiB and a part of the other memory, fills them with a pattern, and looks for SECONDS whether anything else
writes there. Prints how much memory it had; exit code 1 names the first page that changed.

guard.py SECONDS MIB [FILE]: MIB of ordinary memory. FILE is created once all is filled."""
import mmap
import sys
import time

PAGE = 2 << 20
PATTERN = b"guarded!" * (PAGE // 8)


def free_huge_pages():
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("HugePages_Free:"))


def main():
    seconds, mib = float(sys.argv[1]), int(sys.argv[2])
    memories = []
    huge = free_huge_pages()
    if huge:
        memories.append(("huge pages", mmap.mmap(-1, huge * PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40000)))
    memories.append(("ordinary memory", mmap.mmap(-1, mib << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)))
    for _, memory in memories:
        for at in range(0, len(memory), PAGE):
            memory[at : at + PAGE] = PATTERN
    if len(sys.argv) > 3:
        open(sys.argv[3], "w").close()
    end = time.monotonic() + seconds
    while True:
        last = time.monotonic() >= end
        for kind, memory in memories:
            for at in range(0, len(memory), PAGE):
                if memory[at : at + PAGE] != PATTERN:
                    sys.exit(f"{kind}: the page at {at:#x} was written to")
        if last:
            break
    print(f"{huge} huge pages and {mib} MiB are as they were")


main()
