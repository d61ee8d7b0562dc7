#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Takes all free huge pages of 2 MiB and a part of the other memory, fills them with a pattern, and looks whether anything else has written there.
Each look prints how much memory it was over; exit code 1 names the first page that changed.

guard.py once SECONDS MIB: looks again and again for that long. MIB: of ordinary memory.
guard.py asked FIFO MIB: creates FIFO.filled once all is filled, then looks once for each line that is written to FIFO, and ends at the line 'end'."""
import ctypes
import mmap
import os
import sys
import time

PAGE = 2 << 20
PATTERN = b"guarded!" * (PAGE // 8)
compare = ctypes.CDLL(None).memcmp
compare.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t]


def free_huge_pages():
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("HugePages_Free:"))


class Guard:
    def __init__(self, mib):
        self.huge, self.mib = free_huge_pages(), mib
        self.memories = []
        if self.huge:
            self.take("huge pages", self.huge * PAGE, 0x40000)  # MAP_HUGETLB
        self.take("ordinary memory", mib << 20, 0)

    def take(self, kind, size, flag):
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | flag)
        for at in range(0, size, PAGE):
            memory[at : at + PAGE] = PATTERN
        self.memories.append((kind, memory, ctypes.addressof(ctypes.c_char.from_buffer(memory))))

    def look(self):
        for kind, memory, start in self.memories:
            for at in range(0, len(memory), PAGE):
                if compare(start + at, PATTERN, PAGE):
                    sys.exit(f"{kind}: the page at {at:#x} was written to")

    def say(self):
        print(f"{self.huge} huge pages and {self.mib} MiB are as they were", flush=True)


def main():
    how, where, mib = sys.argv[1], sys.argv[2], int(sys.argv[3])
    if how == "once":
        end = time.monotonic() + float(where)
        guard = Guard(mib)
        while True:
            guard.look()
            if time.monotonic() >= end:
                break
        guard.say()
        return
    os.mkfifo(where)
    guard = Guard(mib)
    open(where + ".filled", "w").close()
    while True:
        with open(where) as asked:
            line = asked.readline()
        guard.look()
        guard.say()
        if line == "end\n":
            return


main()
