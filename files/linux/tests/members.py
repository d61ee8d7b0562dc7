#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
"""Guests with tombolo.ko and a FUSE mount of the host against a model: `members.py [--kit SERIES | --kernel V] RUN [OPTION…]`.

Builds what the guests boot from and starts `tombolo-files-torture RUN OPTION…`, which boots them; its --help has the runs (together,
deaths) and their options, --seed among them. Needs what claims.py needs, and /dev/fuse.
"""
import argparse, os, shutil, subprocess, sys, tempfile

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from claims import build, from_kit
from rig import Rig, cargo_program


def torture(work):
    """The program, built, and a copy without debugging information for the guests."""
    program = cargo_program("tombolo-files-torture")
    small = os.path.join(work, os.path.basename(program))
    subprocess.run(["strip", "-o", small, program], check=True)
    return program, small


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--kernel")
    p.add_argument("--kit", metavar="SERIES", default="6.12")
    p.add_argument("--root", default="/")
    p.add_argument("--keep", action="store_true", help="keep the work folder, with the guests' consoles")
    p.add_argument("run")
    o, options = p.parse_known_args()
    work = tempfile.mkdtemp(prefix="tombolo-members-")
    try:
        release, root, headers = (o.kernel, o.root, "/usr/src/linux-headers-" + o.kernel) if o.kernel else from_kit(o.kit, work)
        program, small = torture(work)
        image = os.path.join(root, "boot/vmlinuz-" + release)
        rig = Rig(release, image, root, build(release, headers, work), work, [small], modules=["virtio_console"], late=True)
        os.mkdir(work + "/run")
        done = subprocess.run([program, o.run, "--kernel", image, "--initrd", rig.initrd, "--rig", rig.program, "--work", work + "/run", *options])
    finally:
        if o.keep:
            print("consoles are in", work + "/run")
        else:
            shutil.rmtree(work)
    print("%d passed, %d failed" % (done.returncode == 0, done.returncode != 0))
    sys.exit(done.returncode != 0)


if __name__ == "__main__":
    main()
