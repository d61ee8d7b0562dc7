# SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
"""The guests of `tombolo-rig` (vm/rig) for tests in Python: images with tombolo.ko, and one zone between the guests.

`Rig` builds what guests boot from, `Guest.run` gives a command's exit code and output, `Guest.log` what the kernel said.
"""
import json, os, re, selectors, subprocess, sys, time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.abspath(os.path.join(HERE, "../../.."))
MODULES = ["virtio_pci", "virtio_pmem", "nd_pmem"]

BAD = re.compile(r"BUG|Oops|WARNING:|general protection|Call Trace|hung task|refcount_t|INFO: task|soft lockup|Kernel panic")
# Seconds; far beyond what anything here takes, so that no claim fails for a busy host.
TIMEOUT = 300


class Failed(Exception):
    pass


def cargo_program(name):
    """The path of a program of the workspace, built."""
    made = subprocess.run(["cargo", "build", "--locked", "--workspace", "--bin", name, "--message-format", "json"],
                          cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if made.returncode:
        sys.exit(name + " does not build")
    return [m["executable"] for m in map(json.loads, made.stdout.splitlines()) if m.get("executable")][-1]


class Rig:
    """Kernel image and initramfs for one kernel version, built once in `work`; with `late`, tombolo.ko is there but not loaded.
    Binaries go to /bin, files where they are here, both with their libraries."""

    def __init__(self, kernel, image, modules_root, module, work, binaries, modules=(), late=False, files=()):
        self.kernel, self.image, self.work = kernel, image, work
        self.program = cargo_program("tombolo-rig")
        stripped = os.path.join(work, "stripped-" + kernel)
        os.makedirs(stripped, exist_ok=True)
        small = os.path.join(stripped, "tombolo.ko")
        subprocess.run(["strip", "--strip-debug", "-o", small, module], check=True)
        self.initrd = os.path.join(work, "initramfs-%s.cpio" % kernel)
        command = [self.program, "image", "--release", kernel, "--modules", os.path.join(modules_root, "lib/modules", kernel), "--output", self.initrd]
        for option, values in (("--module", [*MODULES, *modules]), ("--unloaded" if late else "--own-module", [small]), ("--program", binaries), ("--file", files)):
            for value in values:
                command += [option, value]
        subprocess.run(command, check=True)

    def boot(self, name, zone, size_mib, smp=2, memory=256, append="", extra=()):
        return Guest(self, name, zone, size_mib, smp, memory, append, extra)


class Guest:
    def __init__(self, rig, name, zone, size_mib, smp, memory, append, extra):
        self.name, self.rig = name, rig
        self.console = os.path.join(rig.work, name + ".log")
        self.process = subprocess.Popen(
            [rig.program, "boot", "--kernel", rig.image, "--image", rig.initrd, "--console", self.console, "--memory", str(memory), "--processors", str(smp),
             "--zone", zone, "--zone-size", str(size_mib << 20), "--append", "slub_debug=FZPU " + append, "--", *extra],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.process.stdout, selectors.EVENT_READ)
        self.buffer = b""
        self.until(b"<<ready>>", TIMEOUT)

    def until(self, mark, timeout):
        end = time.monotonic() + timeout
        while mark not in self.buffer:
            if not self.selector.select(max(0, end - time.monotonic())):
                raise Failed("%s: no answer within %d s; console:\n%s" % (self.name, timeout, self.log()[-4000:]))
            data = os.read(self.process.stdout.fileno(), 65536)
            if not data:
                raise Failed("%s: the guest is gone; console:\n%s" % (self.name, self.log()[-4000:]))
            self.buffer += data
        before, self.buffer = self.buffer.split(mark, 1)
        return before

    def start(self, command):
        self.process.stdin.write(command.replace("\n", "; ").encode() + b"\n")

    def finish(self, timeout=TIMEOUT):
        out = self.until(b"<<rc=", timeout)
        rc = int(self.until(b">>", TIMEOUT))
        return rc, out.decode(errors="replace").strip()

    def ended(self):
        """Whether the command that was started has ended. It doesn't wait."""
        while self.selector.select(0):
            data = os.read(self.process.stdout.fileno(), 65536)
            if not data:
                raise Failed("%s: the guest is gone; console:\n%s" % (self.name, self.log()[-4000:]))
            self.buffer += data
        return b"<<rc=" in self.buffer

    def run(self, command, timeout=TIMEOUT):
        self.start(command)
        return self.finish(timeout)

    def ok(self, command, timeout=TIMEOUT):
        rc, out = self.run(command, timeout)
        if rc:
            raise Failed("%s: `%s` ended with %d: %s" % (self.name, command, rc, out))
        return out

    def log(self):
        with open(self.console, errors="replace") as f:
            return f.read()

    def complaints(self):
        """What the kernel should not have said."""
        out = self.ok("dmesg")
        return [l for l in out.splitlines() if BAD.search(l)]

    def kill(self):
        self.process.kill()
        self.close()

    def off(self):
        if self.process.poll() is None:
            try:
                self.start("poweroff -f")
                self.process.wait(30)
            except (OSError, subprocess.TimeoutExpired):
                self.process.kill()
        self.close()

    def close(self):
        self.process.wait()
        self.selector.close()
        self.process.stdin.close()
        self.process.stdout.close()
