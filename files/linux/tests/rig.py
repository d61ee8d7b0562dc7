# SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
"""Small guests for the module's tests: a busybox initramfs with tombolo.ko, under QEMU's emulation, one zone between them.

A guest runs commands that come over its second serial port; the first is the kernel's console. `Rig` builds what they boot
from, `Guest.run` gives exit code and output, `Guest.log` what the kernel said.
"""
import os, re, shutil, socket, subprocess, sys, tempfile, time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.abspath(os.path.join(HERE, "../../.."))
# QEMU 7.2 returns wrong flags from cmpxchg16b now and then when two CPUs run, and SLUB falls over that: without cx16 it is not used.
# erms and fsrm make a kernel copy with rep movsb, which the emulation does byte by byte.
CPU = "max,-erms,-fsrm,-cx16"
MODULES = ["virtio_pci", "virtio_pmem", "nd_pmem"]

INIT = """#!/bin/busybox sh
/bin/busybox --install -s /bin
mkdir -p /proc /sys /dev /tmp /mnt /z /etc
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev; mount -t tmpfs tmp /tmp
mkdir -p /dev/shm; mount -t tmpfs shm /dev/shm
for m in $(cat /modules/order); do insmod /modules/$m.ko || echo "insmod $m failed"; done
stty -F /dev/ttyS1 raw -echo
exec 3<>/dev/ttyS1
# Orphans are children of this process; busybox' read forgets the half of a line when a child's end interrupts it. So another one reads.
{
	echo "<<ready>>" >&3
	while read -r line <&3; do
		sh -c "$line" </dev/null >/tmp/out 2>&1
		rc=$?
		cat /tmp/out >&3
		echo "<<rc=$rc>>" >&3
	done
	poweroff -f
} &
wait
"""

BAD = re.compile(r"BUG|Oops|WARNING:|general protection|Call Trace|hung task|refcount_t|INFO: task|soft lockup|Kernel panic")
# Seconds; far beyond what anything here takes, so that no claim fails for a busy host.
PATIENCE = 300
# Checks of the kernel's that tell of a busy host rather than of a guest that hangs; that one shows by its silence. tsc=unstable: or the
# kernel changes the code of its tick late in its boot, which QEMU 7.2's emulation gets wrong now and then when another CPU ticks.
CALM = "no_timer_check tsc=unstable nosoftlockup rcupdate.rcu_cpu_stall_suppress=1 "


class Failed(Exception):
    pass


class Rig:
    """Kernel image and initramfs for one kernel version, built once in `work`; with `late`, tombolo.ko is there but not loaded.
    Binaries go to /bin, files where they are here, both with their libraries."""

    def __init__(self, kernel, image, modules_root, module, work, binaries, modules=(), late=False, files=()):
        self.kernel, self.image, self.work = kernel, image, work
        tree = os.path.join(work, "initramfs-" + kernel)
        shutil.rmtree(tree, ignore_errors=True)
        for d in ("bin", "modules"):
            os.makedirs(os.path.join(tree, d))
        shutil.copy(shutil.which("busybox"), os.path.join(tree, "bin/busybox"))
        order = []
        for m in [*MODULES, *modules]:
            deps = subprocess.run(["modprobe", "-S", kernel, "-d", modules_root, "--show-depends", m], capture_output=True, text=True, check=True).stdout
            for line in deps.splitlines():
                if not line.startswith("insmod "):
                    continue
                path = line.split()[1]
                name = os.path.basename(path).split(".ko")[0]
                if name in order:
                    continue
                to = os.path.join(tree, "modules", name + ".ko")
                if path.endswith(".xz"):
                    with open(to, "wb") as f:
                        subprocess.run(["xz", "-dc", path], stdout=f, check=True)
                else:
                    shutil.copy(path, to)
                order.append(name)
        shutil.copy(module, os.path.join(tree, "modules/tombolo.ko"))
        subprocess.run(["strip", "--strip-debug", os.path.join(tree, "modules/tombolo.ko")], check=True)
        if not late:
            order.append("tombolo")
        with open(os.path.join(tree, "modules/order"), "w") as f:
            f.write("\n".join(order) + "\n")
        placed = {(b, "/bin/" + os.path.basename(b)) for b in binaries} | {(path, path) for path in files}
        for path in {p for p, _ in placed if os.access(p, os.X_OK) or re.search(r"\.so\b", p)}:
            libs = subprocess.run(["ldd", path], capture_output=True, text=True).stdout
            placed.update((lib, lib) for lib in re.findall(r"(/\S+) \(0x", libs))
        for path, to in placed:
            os.makedirs(os.path.dirname(tree + to), exist_ok=True)
            shutil.copy(path, tree + to)
        with open(os.path.join(tree, "init"), "w") as f:
            f.write(INIT)
        os.chmod(os.path.join(tree, "init"), 0o755)
        self.initrd = os.path.join(work, "initramfs-%s.cpio" % kernel)
        with open(self.initrd, "wb") as f:
            subprocess.run("find . | cpio -o -H newc --quiet", shell=True, cwd=tree, stdout=f, check=True)

    def boot(self, name, zone, size_mib, smp=2, memory="256M", append="", extra=()):
        return Guest(self, name, zone, size_mib, smp, memory, append, extra)


class Guest:
    def __init__(self, rig, name, zone, size_mib, smp, memory, append, extra):
        self.name, self.rig = name, rig
        self.path = os.path.join(rig.work, name + ".sock")
        self.console = os.path.join(rig.work, name + ".log")
        if os.path.exists(self.path):
            os.unlink(self.path)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(self.path)
        listener.listen(1)
        self.process = subprocess.Popen([
            "qemu-system-x86_64", "-M", "q35", "-accel", "tcg,thread=multi", "-cpu", CPU, "-smp", str(smp),
            "-m", memory + ",maxmem=64G", "-nodefaults", "-display", "none", "-no-reboot",
            "-serial", "file:" + self.console, "-chardev", "socket,id=c,path=" + self.path, "-serial", "chardev:c",
            "-object", "memory-backend-file,id=z,mem-path=%s,size=%dM,share=on" % (zone, size_mib),
            "-device", "virtio-pmem-pci,memdev=z", "-kernel", rig.image, "-initrd", rig.initrd,
            "-append", "console=ttyS0 quiet panic=-1 slub_debug=FZPU " + CALM + append, *extra])
        listener.settimeout(PATIENCE)
        self.stream, _ = listener.accept()
        listener.close()
        self.buffer = b""
        self.until(b"<<ready>>", PATIENCE)

    def until(self, mark, timeout):
        self.stream.settimeout(timeout)
        while mark not in self.buffer:
            try:
                data = self.stream.recv(65536)
            except socket.timeout:
                raise Failed("%s: no answer within %d s; console:\n%s" % (self.name, timeout, self.log()[-4000:]))
            if not data:
                raise Failed("%s: the guest is gone; console:\n%s" % (self.name, self.log()[-4000:]))
            self.buffer += data
        before, self.buffer = self.buffer.split(mark, 1)
        return before

    def start(self, command):
        self.stream.sendall(command.replace("\n", "; ").encode() + b"\n")

    def finish(self, timeout=PATIENCE):
        out = self.until(b"<<rc=", timeout)
        rc = int(self.until(b">>", PATIENCE))
        return rc, out.decode(errors="replace").strip()

    def run(self, command, timeout=PATIENCE):
        self.start(command)
        return self.finish(timeout)

    def ok(self, command, timeout=PATIENCE):
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
        self.process.wait()
        self.stream.close()

    def off(self):
        if self.process.poll() is None:
            try:
                self.start("poweroff -f")
                self.process.wait(30)
            except (OSError, subprocess.TimeoutExpired):
                self.process.kill()
                self.process.wait()
        self.stream.close()
