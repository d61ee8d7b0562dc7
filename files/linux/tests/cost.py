#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
"""Counts the instructions of calls on a mount in a guest, kernel and program together: `cost.py [--kit SERIES] [--results DIR] [TREE]…`.

TREE: a checkout of this project, by default this one; a module is built of each, and each is compared with the first. The guest has one CPU under
QEMU's -icount, which executes one instruction in each nanosecond of the guest's time, so that the host's load changes nothing. Each tree has two
rounds; the first one also counts what the guest does after its boot beside it. --results writes the second rounds to DIR/files-cost.jsonl, in the
form of all benches (bench/record): the system is "tombolo" for this checkout, and the commit for another one.
"""
import argparse, datetime, glob, json, os, shutil, subprocess, sys, tempfile

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import claims
from rig import Rig, ROOT

ZONE_MIB = 256
# A guest whose instructions are counted has one thread.
QEMU = """#!/bin/bash
for word; do words+=("${word/thread=multi/thread=single}"); done
exec "%s" "${words[@]}"
"""


def built(tree, headers, work):
    """A tree's module, and its program that makes a zone: formats differ."""
    out, make_zone = os.path.join(work, "build"), os.path.join(work, "mkzone")
    subprocess.run(["make", "-s", "-C", os.path.join(tree, "files/linux"), "KDIR=" + headers, "OUT=" + out], check=True, stdout=sys.stderr)
    includes = ["-I" + os.path.join(tree, part) for part in ("files/core", "zone/format")]
    sources = [os.path.join(tree, "files/linux/tests/mkzone.c"), *glob.glob(os.path.join(tree, "files/core/*.c"))]
    subprocess.run(["cc", "-O2", *includes, *sources, "-o", make_zone], check=True)
    return os.path.join(out, "tombolo.ko"), make_zone


def counts(rig, make_zone, work):
    zone = os.path.join(work, "zone")
    subprocess.run([make_zone, zone, str(ZONE_MIB), "8"], check=True)
    guest = rig.boot("cost", zone, ZONE_MIB, smp=1, append="slub_debug=-", extra=["-icount", "shift=0,sleep=off"])
    try:
        guest.ok("mount -t tombolo test /mnt")
        rounds = [guest.ok("cost /mnt") for _ in range(2)]
    finally:
        guest.off()
        os.unlink(zone)
    return [{what: int(n) for what, n in (line.split() for line in text.splitlines())} for text in rounds]


def commit(tree):
    git = ["git", "-C", tree]
    changed = subprocess.check_output([*git, "status", "--porcelain", "--untracked-files=no"])
    return subprocess.check_output([*git, "rev-parse", "--short", "HEAD"], text=True).strip() + ("+" if changed else "")


def machine(qemu, release):
    """The first line of a results file."""
    with open("/proc/cpuinfo") as cpuinfo, open("/proc/meminfo") as meminfo:
        model = next(line.split(":", 1)[1].strip() for line in cpuinfo if line.startswith("model name"))
        memory = next(int(line.split()[1]) for line in meminfo if line.startswith("MemTotal:"))
    version = subprocess.check_output([qemu, "--version"], text=True).splitlines()[0]
    return {
        "command": " ".join(["files/linux/tests/cost.py", *sys.argv[1:]]),
        "commit": commit(ROOT),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "cpu": "%s, %d cores" % (model, os.cpu_count()),
        "memory_mib": memory // 1024,
        "kernel": os.uname().release,
        "qemu": version + " (tcg)",
        "versions": ["guest kernel " + release],
        "settings": "one CPU, -icount shift=0: an instruction each nanosecond of the guest's time; the second round of each tree",
    }


def record(folder, machine, systems, measured):
    lines = [machine]
    for system, (_, counts) in zip(systems, measured):
        sample = {"bench": "files-cost", "system": system, "unit": "instructions", "better": "lower"}
        lines += [{**sample, "case": what, "value": n} for what, n in counts.items()]
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "files-cost.jsonl"), "w") as f:
        f.writelines(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--kit", default="6.12", metavar="SERIES", help="a kernel of the guest kit (guest/README.md)")
    options.add_argument("--results", metavar="DIR", help="bench/results, for figures that are to be kept")
    options.add_argument("trees", nargs="*", default=[ROOT], metavar="TREE")
    options = options.parse_args()
    work = tempfile.mkdtemp(prefix="tombolo-cost-", dir="/dev/shm")
    try:
        qemu = os.path.join(work, "qemu")
        real_qemu = os.environ.get("TOMBOLO_QEMU") or shutil.which("qemu-system-x86_64")
        with open(qemu, "w") as f:
            f.write(QEMU % real_qemu)
        os.chmod(qemu, 0o755)
        os.environ["TOMBOLO_QEMU"] = qemu
        release, root, headers = claims.from_kit(options.kit, work)
        program = os.path.join(work, "cost")
        subprocess.run(["cc", "-O2", "-static", os.path.join(ROOT, "files/linux/tests/cost.c"), "-o", program], check=True)
        measured = []
        for i, tree in enumerate(options.trees):
            inside = os.path.join(work, str(i))
            os.mkdir(inside)
            module, make_zone = built(tree, headers, inside)
            rig = Rig(release, os.path.join(root, "boot/vmlinuz-" + release), root, module, inside, [program])
            measured.append(counts(rig, make_zone, inside))
    finally:
        shutil.rmtree(work)
    print("instructions a call, the two rounds of each tree, and the second one beside the first tree's; %s" % release)
    for what, first in measured[0][1].items():
        cells = ["%7d %7d %+6.1f %%" % (a[what], b[what], 100 * (b[what] / first - 1)) for a, b in measured]
        print("%-14s %s" % (what, " | ".join(cells)))
    if options.results:
        systems = ["tombolo" if os.path.realpath(tree) == os.path.realpath(ROOT) else commit(tree) for tree in options.trees]
        record(options.results, machine(real_qemu, release), systems, measured)


if __name__ == "__main__":
    main()
