#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 OR MIT
"""OpenCL in a VM under QEMU's emulation, carried out by this machine: `vm.py [--kit SERIES] [--programs] [CLAIM…]`.

The VM has a zone of its own, made by `tombolo-accel serve --vm`, and as the fallback a network. Needs what packages/accel.list and the
module's tests need, and the guest kit (guest/README.md). --programs tries clblast's test programs, hashcat, clpeak and pyopencl's own tests
instead (minutes each). Prints one line per claim and the counts; exit code 0 when all hold.
"""
import argparse, contextlib, glob, os, re, shlex, shutil, signal, socket, subprocess, sys, tempfile, time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.abspath(os.path.join(HERE, "../.."))
sys.path.insert(0, os.path.join(ROOT, "files/linux/tests"))
import programs
from claims import build, from_kit
from rig import Failed, Rig

CHANNELS = 3
TIMEOUT = 3000  # seconds that a real program may take in a VM; far beyond what any does
CLBLAST = ["clblast_test_" + t for t in ("xaxpy", "xdot", "xhad", "xgemv")]
CLAIMS = []
PROGRAMS = []  # claims that take minutes


def claim(f):
    CLAIMS.append(f)
    return f


def program_claim(f):
    PROGRAMS.append(f)
    return f


class Host:
    """The server, and the same programs on the native driver."""

    def __init__(self, work, target, gib):
        """gib: of device memory that the native driver may have; hashcat wants more than 2."""
        self.work, self.target, self.native_output = work, target, {}
        self.vm = os.path.join("/dev/shm", os.path.basename(work))
        self.environment = dict(os.environ, POCL_CACHE_DIR=work + "/cache", POCL_MEMORY_LIMIT=str(gib), HOME=work, XDG_DATA_HOME=work)
        self.environment.pop("OCL_ICD_VENDORS", None)
        os.makedirs(work + "/cache")
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        self.log = open(work + "/server.log", "w+")
        self.server = subprocess.Popen(
            [target + "/tombolo-accel", "serve", "--listen", "unix:%s/socket" % work, "--listen", "tcp:127.0.0.1:%d" % self.port,
             "--vm", self.vm, "--vm-channels", str(CHANNELS), "--vm-window", "64", "--memory", str(gib << 10)], env=self.environment, stderr=self.log)
        begun = time.monotonic()
        while not os.path.exists(self.vm + "/bell") or "-device" not in self.said():
            if self.server.poll() is not None or time.monotonic() - begun > 300:
                raise Failed("the server doesn't serve: " + self.said())
            time.sleep(0.05)

    def said(self):
        with open(self.log.name) as f:
            return f.read()

    def qemu(self):
        return ["-chardev", "socket,id=calls,path=%s/bell" % self.vm, "-device", "ivshmem-doorbell,chardev=calls,vectors=1",
                "-netdev", "user,id=net,restrict=off", "-device", "virtio-net-pci,netdev=net,romfile="]

    def native(self, *command, may_die=False):
        """What a command prints natively; None: it may die of the driver, and has."""
        if command not in self.native_output:
            try:
                done = subprocess.run(command, env=self.environment, cwd=self.work, capture_output=True, text=True, timeout=TIMEOUT)
            except subprocess.TimeoutExpired:
                raise Failed("%s natively: no end within %d s" % (" ".join(command), TIMEOUT))
            if may_die and done.returncode == -signal.SIGSEGV:
                return None
            if done.returncode:
                raise Failed("%s natively: ended with %d: %s" % (" ".join(command), done.returncode, (done.stdout + done.stderr)[-2000:]))
            self.native_output[command] = done.stdout.strip()
        return self.native_output[command]

    def hello(self):
        """What a client of this build sends first, as busybox's printf takes it."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            environment = dict(self.environment, OCL_ICD_VENDORS=self.work + "/libtombolo_opencl.so",
                               TOMBOLO_ACCEL="tcp:127.0.0.1:%d" % server.getsockname()[1])
            client = subprocess.Popen(["clinfo"], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            server.settimeout(30)
            connection, _ = server.accept()
            with connection:
                said = connection.recv(4096)
            server.close()
            client.wait(30)
        return "".join("\\%03o" % byte for byte in said)

    def workers(self):
        out = subprocess.run(["pgrep", "-P", str(self.server.pid)], capture_output=True, text=True).stdout
        return [int(p) for p in out.split()]

    def end(self):
        self.server.terminate()
        self.server.wait()
        shutil.rmtree(self.vm, ignore_errors=True)


def python_packages(*names):
    """The files of packages that are installed here, and of those of Python's that they need."""
    shown = subprocess.run(["dpkg-query", "-W", "-f", "${Package} ${Pre-Depends} ${Depends}\n"], capture_output=True, text=True, check=True).stdout
    needs = {name: re.findall(r"(?:lib)?python3[\w.-]*", depends) for name, _, depends in (line.partition(" ") for line in shown.splitlines())}
    todo, found = list(names), set()
    while todo:
        name = todo.pop()
        if name in needs and name not in found:
            found.add(name)
            todo += needs[name]
    listed = subprocess.run(["dpkg-query", "-L", *found], capture_output=True, text=True, check=True).stdout.splitlines()
    return [path for path in listed if os.path.isfile(path) and not path.startswith(("/usr/share/doc/", "/usr/share/man/"))]


def same(program, a, b):
    # What a program beside the driver alone can use (accel/README.md).
    a = re.sub(r"((?:Fine-grained system sharing|Run native kernels) +)Yes", r"\1No", a)
    a = re.sub(r"^ *Command buffer capabilities.*\n(?:.*\n){3}", "", a, flags=re.M)
    withheld = "(?:cl_khr_command_buffer|cl_pocl_content_size)"
    a = re.sub(r" %s\b" % withheld, "", re.sub(r"^ +%s .*\n" % withheld, "", a, flags=re.M))
    if not a.strip():
        raise Failed("%s prints nothing natively" % program)
    for x, y in zip(a.splitlines(), b.splitlines()):
        if x != y:
            raise Failed("%s: natively `%s`, in the VM `%s`" % (program, x, y))
    if len(a.splitlines()) != len(b.splitlines()):
        raise Failed("%s: %d lines natively, %d in the VM" % (program, len(a.splitlines()), len(b.splitlines())))


ZONE = "TOMBOLO_ACCEL=zone:/dev/tombolo-calls-"


@claim
def clinfo_says_the_same_in_a_vm(host, vm, zone):
    same("clinfo", host.native("clinfo"), vm.ok(zone + " clinfo 2>/tmp/err"))


@claim
def every_call_in_a_vm_answers_as_on_the_native_driver(host, vm, zone):
    same("calls", host.native(host.work + "/calls"), vm.ok(zone + " calls 2>/tmp/err", 300))


@claim
def programs_on_images_with_viennacl_and_with_shared_virtual_memory_print_in_a_vm_what_they_print_natively(host, vm, zone):
    for program in ("image", "gemm", "svm", "answers"):
        same(program, host.native(host.work + "/" + program), vm.ok(zone + " %s 2>/tmp/err" % program, 300))
    own = vm.ok(zone + " answers own 2>/tmp/err", 300)
    # The PoCL of Debian 13 dies of a fill of a program's own memory.
    natively = host.native(host.work + "/answers", "own", may_die=True)
    if natively is not None:
        same("answers own", natively, own)


@claim
def a_program_that_forks_in_a_vm_keeps_its_channel_whatever_its_child_does(host, vm, zone):
    for does in ("releases", "exits", "uses", "asks"):
        said = vm.ok(zone + " fork %s 2>/tmp/err" % does, 100)
        if said.split("\n")[:5] != ["before 0", "child 0", "after 0", "after 0", "after 0"]:
            raise Failed("a child that %s: %s" % (does, said))


def program_says_the_same(host, vm, environment, name, counts, *arguments):
    native = "\n".join(counts(host.native(shutil.which(name), *arguments)))
    begun = time.monotonic()
    said = "\n".join(counts(vm.ok("cd /tmp; PATH=/usr/bin:/bin HOME=/tmp %s %s 2>/tmp/err || { rc=$?; cat /tmp/err; exit $rc; }" % (environment, " ".join([name, *arguments])), TIMEOUT)))
    print("      %s: %d lines, %.0f s in the VM" % (name, len(said.splitlines()), time.monotonic() - begun), flush=True)
    same(name, native, said)


@program_claim
def clblast_tests_print_in_a_vm_what_they_print_natively(host, vm, zone):
    for name in CLBLAST:
        program_says_the_same(host, vm, zone, name, programs.plain)


@program_claim
def hashcat_passes_its_self_test_and_cracks_in_a_vm_as_natively(host, vm, zone):
    with open(host.work + "/words", "w") as f:
        f.write(programs.WORDS)
    vm.ok("printf %s > /tmp/words" % shlex.quote(programs.WORDS.replace("\n", "\\n")))
    program_says_the_same(host, vm, zone, programs.HASHCAT[0], programs.cracked, *programs.HASHCAT[1:], "words")


@program_claim
def clpeak_measures_in_a_vm_all_that_it_measures_natively(host, vm, zone):
    program_says_the_same(host, vm, zone, "clpeak", programs.numbers_away)


@program_claim
def pyopencls_tests_end_in_a_vm_as_natively(host, vm, zone):
    # QEMU 7.2's emulation computes wrongly with AVX2 and FMA: numpy alone says there that tanh(-3) is -1058.
    environment = zone + " NPY_DISABLE_CPU_FEATURES='AVX2 FMA3'"
    for path in programs.pyopencl_tests(host.work):
        program_says_the_same(host, vm, environment, programs.PYTEST[0], programs.pytest_results, *programs.PYTEST[1:], path)


@claim
def channels_come_back_however_a_process_ends_and_no_more_are_given_than_there_are(host, vm, zone):
    for _ in range(CHANNELS + 1):
        vm.ok("exec 5<>/dev/tombolo-calls-*; true")
    device = "/dev/tombolo-calls-" + os.path.basename(host.vm)
    opened = " ".join("%d<>%s" % (5 + i, device) for i in range(CHANNELS))
    rc, out = vm.run("exec %s; exec %d<>%s" % (opened, 5 + CHANNELS, device))
    if rc == 0:
        raise Failed("more than %d channels: %s" % (CHANNELS, out))
    vm.ok("sh -c 'exec %s; touch /tmp/held; exec sleep 1000' & until test -e /tmp/held; do sleep 0.1; done; kill -9 $!; wait $!; true" % opened)
    same("clinfo", host.native("clinfo"), vm.ok("for i in 1 2 3 4; do %s clinfo > /tmp/info 2>/tmp/err || exit 1; done; cat /tmp/info" % zone))


@claim
def who_comes_when_all_channels_were_just_left_waits_until_they_are_cleared(host, vm, zone):
    device = "/dev/tombolo-calls-" + os.path.basename(host.vm)
    opened = " ".join("%d<>%s" % (5 + i, device) for i in range(CHANNELS))
    vm.ok("for i in $(seq 10); do (exec %s) || exit 1; done" % opened)


@claim
def a_worker_maps_its_channel_of_the_zone_and_keeps_no_descriptor_of_it(host, vm, zone):
    device = "/dev/tombolo-calls-" + os.path.basename(host.vm)
    vm.ok("sh -c 'exec 5<>%s; touch /tmp/open; exec sleep 1000' & echo $! > /tmp/holder; until test -e /tmp/open; do sleep 0.1; done" % device)
    zone, begun, mapped, kept = os.path.getsize(host.vm + "/zone"), time.monotonic(), [], []
    # A worker maps its channel first, closes the zone next, and only then reads a byte of it: it waits for its client's first word.
    while not mapped or kept:
        if time.monotonic() - begun > 300:
            raise Failed("mapped of the zone: %s, descriptors of it: %s" % (mapped, kept))
        for pid in host.workers():
            with open("/proc/%d/maps" % pid) as maps:
                mapped = [line.split()[0] for line in maps if line.rstrip().endswith("/zone")]
            kept = [fd for fd in glob.glob("/proc/%d/fd/*" % pid) if os.path.lexists(fd) and os.readlink(fd).endswith("/zone")]
    sizes = [int(end, 16) - int(begin, 16) for begin, end in (m.split("-") for m in mapped)]
    if len(sizes) != 1 or sizes[0] * CHANNELS > zone:
        raise Failed("of a zone of %d bytes for %d channels a worker maps %s" % (zone, CHANNELS, sizes))
    vm.ok("kill -9 $(cat /tmp/holder); rm /tmp/open")


@claim
def a_program_whose_worker_dies_gets_its_apis_code_and_the_next_one_is_served(host, vm, zone):
    vm.start(zone + " clinfo 2>&1 >/tmp/info")
    begun = time.monotonic()
    while not host.workers():
        if time.monotonic() - begun > 300:
            raise Failed("no worker came")
        time.sleep(0.01)
    for pid in host.workers():
        os.kill(pid, 9)
    _, said = vm.finish()
    if "accelerator server" not in said:
        raise Failed("nothing said why: " + said)
    same("clinfo", host.native("clinfo"), vm.ok(zone + " clinfo 2>/tmp/err"))


# A process can't leave an initramfs by pivot_root, so servers in the VM are unconfined.
SERVE = "tombolo-accel serve --listen tcp:127.0.0.1:7790 --memory 64 --window 16 --weight 30 --unconfined"
LISTENS = ("for i in $(seq 300); do netstat -ltn | grep -q 7790 && exit 0; test -d /proc/$(cat /tmp/server) || break; sleep 0.1; done; "
           "cat /tmp/served; exit 1")
CGROUP = "mkdir -p /cg; test -e /cg/cgroup.procs || mount -t cgroup2 none /cg; echo +memory +pids +cpu > /cg/cgroup.subtree_control; ifconfig lo up; "


def connect_in(host, vm):
    """Connects a client to the server in the VM that says who it is and asks for nothing."""
    vm.ok("rm -f /tmp/says; mkfifo /tmp/says; (exec 3<>/tmp/says; printf '%s' >&3; exec nc 127.0.0.1 7790 <&3 >/dev/null) & echo $! > /tmp/silent" % host.hello())


@contextlib.contextmanager
def served_in(host, vm, options="", prepare="", folder="/cg/*", signal="TERM"):
    """A server in the VM, with a client that asks for nothing: the group of the client's worker, below a folder. The server gets the
    signal however the claim goes on, and has ended then: the next claim's has the same port."""
    vm.ok(CGROUP + "mkdir -p /cg/accel; (%s exec %s %s >/tmp/served 2>&1) & echo $! > /tmp/server" % (prepare, SERVE, options))
    try:
        vm.ok(LISTENS)
        connect_in(host, vm)
        # A group is made and limited before the worker begins in it.
        events = vm.ok("for i in $(seq 300); do grep -ls 'populated 1' %s/worker-*/cgroup.events && exit 0; sleep 0.1; done; cat /tmp/served; ls /cg; exit 1" % folder)
        yield os.path.dirname(events.strip())
    finally:
        vm.ok("kill $(cat /tmp/silent) 2>/dev/null; kill -%s $(cat /tmp/server); "
              "for i in $(seq 300); do test -d /proc/$(cat /tmp/server) || exit 0; sleep 0.1; done; exit 1" % signal)


def expect(what, found, wanted):
    if found != wanted:
        raise Failed("%s: %s, not %s" % (what, found, wanted))


@claim
def a_worker_lives_in_a_cgroup_of_its_own_with_limits_which_ends_with_it(host, vm, zone):
    with served_in(host, vm, "--cgroup /cg/accel", folder="/cg/accel") as group:
        said = vm.ok("cd %s; cat memory.max pids.max cpu.weight memory.oom.group; wc -l < cgroup.procs" % group).split()
        expect("the worker's group", said, [str((64 + 2048 + 16 + 512) << 20), "1024", "30", "1", "1"])
        vm.ok("kill $(cat /tmp/silent); for i in $(seq 300); do test -d %s || exit 0; sleep 0.1; done; ls /cg/accel; exit 1" % group)
        connect_in(host, vm)
    expect("groups of a server that has ended", vm.ok("ls -d /cg/accel/*/ 2>/dev/null || true"), "")


@claim
def a_server_of_root_finds_a_cgroup_by_itself_and_none_stays_behind(host, vm, zone):
    with served_in(host, vm) as group:
        expect("the worker's group", os.path.dirname(group), "/cg/tombolo-accel-" + vm.ok("cat /tmp/server").strip())
    expect("groups of a server that was told to end", vm.ok("ls -d /cg/tombolo-* 2>/dev/null || true"), "")
    with served_in(host, vm, signal="KILL") as group:
        left = os.path.dirname(group)
    vm.ok("test -d " + left)
    with served_in(host, vm) as group:
        expect("groups after one that was killed", vm.ok("ls -d /cg/tombolo-*").split(), [os.path.dirname(group)])


@claim
def a_server_divides_the_cgroup_that_systemd_delegates(host, vm, zone):
    vm.ok(CGROUP + "mkdir -p /cg/unit && setfattr -n user.delegate -v 1 /cg/unit")
    # Delegate=yes
    with served_in(host, vm, prepare="sh -c 'echo $PPID > /cg/unit/cgroup.procs';") as group:
        expect("the worker's group", os.path.dirname(group), "/cg/unit")
        expect("the server's", vm.ok("cat /cg/unit/server/cgroup.procs"), vm.ok("cat /tmp/server"))
    # DelegateSubgroup=main
    vm.ok("mkdir -p /cg/unit/main")
    with served_in(host, vm, prepare="sh -c 'echo $PPID > /cg/unit/main/cgroup.procs';") as group:
        expect("the worker's group", os.path.dirname(group), "/cg/unit")
        expect("the server's", vm.ok("cat /cg/unit/main/cgroup.procs"), vm.ok("cat /tmp/server"))
    # Another process in it: it can't be divided, and the server stays where it was.
    vm.ok("rmdir /cg/unit/main /cg/unit/server; echo > /cg/unit/cgroup.subtree_control -cpu; echo > /cg/unit/cgroup.subtree_control '-memory -pids'; "
          "sleep 1000 & echo $! > /tmp/other; echo $! > /cg/unit/cgroup.procs")
    with served_in(host, vm, prepare="sh -c 'echo $PPID > /cg/unit/cgroup.procs';") as group:
        expect("the worker's group", os.path.dirname(group), "/cg/tombolo-accel-" + vm.ok("cat /tmp/server").strip())
        expect("who is in the unit's group", sorted(vm.ok("cat /cg/unit/cgroup.procs").split()), sorted(vm.ok("cat /tmp/server /tmp/other").split()))
    vm.ok("kill $(cat /tmp/other)")


@claim
def the_workers_of_a_vm_have_a_cgroup_together(host, vm, zone):
    vm.ok("mkdir -p /tmp/vms; mount -t tmpfs none /tmp/vms")
    with served_in(host, vm, "--vm /tmp/vms/guest --vm-channels 8 --vm-window 4") as group:
        folder = vm.ok("ls -d %s/vm-*-guest" % os.path.dirname(group)).strip()
        said = vm.ok("cd %s; cat memory.max pids.max cpu.weight cgroup.subtree_control" % folder).split()
        expect("the VM's group", said, [str((64 + 8 * 4 + 2 * (2048 + 512)) << 20), "2048", "30", "cpu", "memory", "pids"])
    expect("groups of a server that has ended", vm.ok("ls -d /cg/tombolo-* 2>/dev/null || true"), "")
    vm.ok("umount /tmp/vms")


@claim
def a_server_without_a_cgroup_says_so_once_with_a_remedy_and_serves(host, vm, zone):
    vm.ok("umount /cg 2>/dev/null; ifconfig lo up; (exec %s >/tmp/served 2>&1) & echo $! > /tmp/server; %s" % (SERVE, LISTENS))
    said = vm.ok("cat /tmp/served")
    expect("lines", [said.count(word) for word in ("no control group: ", "Delegate=yes", "--cgroup")], [1, 1, 1])
    vm.ok("kill $(cat /tmp/server)")


@claim
def over_tcp_where_there_is_no_zone_every_call_answers_the_same(host, vm, zone):
    vm.ok("ifconfig eth0 10.0.2.15 netmask 255.255.255.0 up")
    same("calls", host.native(host.work + "/calls"), vm.ok("TOMBOLO_ACCEL=tcp:10.0.2.2:%d calls 2>/tmp/err" % host.port, 300))


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--kit", default="6.12", metavar="SERIES")
    p.add_argument("--target", default=os.path.join(ROOT, "target/debug"), help="where tombolo-accel and libtombolo_opencl.so are")
    p.add_argument("--programs", action="store_true", help="real programs, minutes each")
    p.add_argument("claims", nargs="*")
    o = p.parse_args()
    work = tempfile.mkdtemp(prefix="tombolo-accel-vm-")
    binaries, files = [], []
    if o.programs:
        binaries = [shutil.which(p) for p in (*CLBLAST, "clpeak")]
        files.append(shutil.which("hashcat"))  # it finds its files by where it lies itself
        for pattern in ("OpenCL/*", "modules/module_00000.so", "tunings/*"):
            files += glob.glob("/usr/share/hashcat/" + pattern)
        tests = programs.pyopencl_tests(work)
        files += python_packages("python3-pyopencl", "python3-pytest", "python3-mako") + tests + glob.glob(os.path.dirname(tests[0]) + "/*.h")
    host = vm = None
    passed = failed = 0
    try:
        kernel, root, headers = from_kit(o.kit, work)
        subprocess.run(["cc", "-O1", "-Wno-deprecated-declarations", HERE + "/calls.c", "-o", work + "/calls", "-lOpenCL", "-lpthread"], check=True)
        for program in ("image", "svm", "answers", "fork"):
            subprocess.run(["cc", "-O1", "-w", HERE + "/%s.c" % program, "-o", work + "/" + program, "-lOpenCL"], check=True)
        subprocess.run(["c++", "-O0", "-w", HERE + "/gemm.cpp", "-o", work + "/gemm", "-lOpenCL", "-lpthread"], check=True)
        shutil.copy(o.target + "/libtombolo_opencl.so", work)
        subprocess.run(["strip", work + "/libtombolo_opencl.so"], check=True)
        rig = Rig(kernel, root + "/boot/vmlinuz-" + kernel, root, build(kernel, headers, work), work,
                  [work + "/calls", work + "/image", work + "/gemm", work + "/svm", work + "/answers", work + "/fork", shutil.which("clinfo"), work + "/libtombolo_opencl.so", o.target + "/tombolo-accel", shutil.which("setfattr"), *binaries], ["virtio_net"], files=files)
        host = Host(work, o.target, 6 if o.programs else 2)
        vm = rig.boot("vm", host.vm + "/zone", os.path.getsize(host.vm + "/zone") >> 20, memory=2048 if o.programs else 512, extra=host.qemu())
        name = os.path.basename(host.vm)
        vm.ok("mkdir -p /etc/OpenCL/vendors; echo /bin/libtombolo_opencl.so > /etc/OpenCL/vendors/tombolo.icd")
        # hashcat follows a null pointer where its user has no entry (folder_config_init asks getpwuid_r), whatever the driver.
        vm.ok("echo root:x:0:0:root:/root:/bin/sh > /etc/passwd")
        vm.ok("echo %s > /sys/module/tombolo/parameters/calls; test -c /dev/tombolo-calls-%s || (dmesg | tail -5; exit 1)" % (name, name))
        for f in PROGRAMS if o.programs else CLAIMS:
            if o.claims and not any(c in f.__name__ for c in o.claims):
                continue
            begun, why = time.monotonic(), None
            try:
                f(host, vm, ZONE + name)
                why = vm.complaints()
            except Failed as e:
                why = str(e)
            print("%s %s (%.1f s)" % ("FAIL" if why else "ok  ", f.__name__, time.monotonic() - begun))
            if why:
                print("     ", why, "\n     server:", host.said()[-2000:])
            passed, failed = passed + (not why), failed + bool(why)
    except Failed as e:
        print("FAIL", e, host.said() if host else "")
        failed += 1
    finally:
        if vm:
            vm.process.kill()
            vm.process.wait()
        if host:
            host.end()
        shutil.rmtree(work)
    print("%d passed, %d failed" % (passed, failed))
    sys.exit(1 if failed or not passed else 0)


main()
