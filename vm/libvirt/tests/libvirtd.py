#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 OR MIT
"""`tombolo libvirt` with a real libvirtd and domains of type qemu: `libvirtd.py --tombolo PROGRAM --kit FOLDER`.

libvirtd runs as root in mount, network and PID namespaces of its own, with folders and a configuration of its own, and ends with them; its QEMUs run as
Debian's user libvirt-qemu, which these namespaces have. Prints a line per claim and the counts. Needs root, libvirt-daemon, libvirt-daemon-driver-qemu, libvirt-clients and the guest kit.
"""
import argparse, json, os, shutil, signal, socket, subprocess, sys, tempfile, time

TIMEOUT = 300
HERE = os.path.dirname(os.path.abspath(__file__))
PAGES = HERE + "/../../../scripts/pages.py"
DOMAIN = """<domain type='qemu'>
  <name>{name}</name>
  <memory unit='MiB'>256</memory>
  <vcpu>2</vcpu>
  <os>
    <type arch='x86_64' machine='q35'>hvm</type>
    <kernel>{folder}/vmlinuz</kernel>
    <initrd>{folder}/initrd.img</initrd>
    <cmdline>console=ttyS0 quiet panic=-1 no_timer_check tsc=unstable nohz=off tombolo.ip=eth0={address}/24</cmdline>
  </os>
  <features><acpi/></features>
  <cpu mode='maximum'>
    <feature policy='disable' name='erms'/><feature policy='disable' name='fsrm'/><feature policy='disable' name='cx16'/>
  </cpu>
  <devices>
    <serial type='unix'><source mode='bind' path='{folder}/{name}.serial'/></serial>
    <memballoon model='none'/>
  </devices>
</domain>
"""


class Failed(Exception):
    pass


def need(what, message):
    if not what:
        raise Failed(message)


def run(*words, good=True):
    done = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if good:
        need(done.returncode == 0, "%s: %s%s" % (" ".join(words), done.stdout, done.stderr))
        return done.stdout
    need(done.returncode != 0, "%s succeeded: %s" % (" ".join(words), done.stdout))
    return done.stderr


def until(what, done):
    end = time.monotonic() + TIMEOUT
    while not done():
        need(time.monotonic() < end, what)
        time.sleep(0.05)


class Shell:
    """The guest's shell on its serial line."""

    def __init__(self, path):
        self.socket = socket.socket(socket.AF_UNIX)
        until("no serial line %s" % path, lambda: self.socket.connect_ex(path) == 0)
        self.socket.settimeout(TIMEOUT)
        self.text = ""
        self.commands = 0
        self.wait_for("tombolo-guest ready")

    def wait_for(self, words):
        while words not in self.text:
            try:
                more = self.socket.recv(65536)
            except TimeoutError:
                raise Failed("no '%s' on the console: %s" % (words, self.text[-2000:]))
            need(more, "the console ended: %s" % self.text[-2000:])
            self.text += more.decode(errors="replace")
        before, self.text = self.text.split(words, 1)
        return before

    def run(self, command):
        """Runs a command that must succeed; what it said. The echo of the line has its marks in two pieces."""
        self.commands += 1
        n = self.commands
        self.socket.sendall(("echo 'be''gin'-%d; { %s; } 2>&1; echo 'en''d'-%d $?\n" % (n, command, n)).encode())
        self.wait_for("begin-%d" % n)
        said = self.wait_for("end-%d " % n).strip()
        status = self.wait_for("\n").strip()
        need(status == "0", "`%s` in the guest: %s %s" % (command, status, said))
        return said


def listens(path):
    """Whether a socket is served: it has its name a moment before that."""
    with socket.socket(socket.AF_UNIX) as s:
        return s.connect_ex(path) == 0


class World:
    def __init__(self, tombolo, kit):
        self.program = tombolo
        self.folder = tempfile.mkdtemp(dir="/run")
        os.chmod(self.folder, 0o755)
        for file in ("vmlinuz", "initrd.img"):
            shutil.copy(os.path.join(kit, file), self.folder)
        self.zone = self.folder + "/own.zone"
        self.second = self.folder + "/second/own.zone"
        os.mkdir(os.path.dirname(self.second), 0o755)
        self.control = self.folder + "/switch.sock"
        self.shells = {}
        self.libvirtd()
        self.tombolo("zone", "create", self.zone, "--size", "32M")
        self.tombolo("files", "mkfs", self.zone)
        self.switch = subprocess.Popen([self.program, "net", "run", "--control", self.control], stdin=subprocess.DEVNULL)
        until("no switch", lambda: listens(self.control))
        for name, address in (("a", "10.0.0.1"), ("b", "10.0.0.2")):
            self.define(name, address)

    def define(self, name, address):
        xml = "%s/%s.xml" % (self.folder, name)
        with open(xml, "w") as f:
            f.write(DOMAIN.format(name=name, folder=self.folder, address=address))
        run("virsh", "define", xml)

    def libvirtd(self):
        os.makedirs("/etc/libvirt/hooks/qemu.d")
        with open(HERE + "/../hook/tombolo") as f:
            hook = f.read().replace("/usr/bin/tombolo", self.program)
        with open("/etc/libvirt/hooks/qemu.d/tombolo", "w") as f:
            f.write(hook)
        os.chmod("/etc/libvirt/hooks/qemu.d/tombolo", 0o755)
        with open("/etc/libvirt/qemu.conf", "w") as f:
            f.write("security_driver = 'none'\ncgroup_controllers = []\nnamespaces = []\nstdio_handler = 'file'\n".replace("'", '"'))
        with open("/etc/libvirt/libvirtd.conf", "w") as f:
            f.write('auth_unix_rw = "none"\nauth_unix_ro = "none"\nlog_outputs = "3:file:%s/libvirtd.log"\n' % self.folder)
        self.daemon = subprocess.Popen(["libvirtd", "--config", "/etc/libvirt/libvirtd.conf"], stdin=subprocess.DEVNULL)

        def answers():
            need(self.daemon.poll() is None, "libvirtd ended")
            return subprocess.run(["virsh", "list"], capture_output=True).returncode == 0

        until("no libvirtd", answers)

    def tombolo(self, *words, good=True):
        return run(self.program, *words, good=good)

    def start(self, name):
        run("virsh", "start", name)
        self.shells[name] = Shell("%s/%s.serial" % (self.folder, name))
        return self.shells[name]

    def pid(self, name):
        with open("/run/libvirt/qemu/%s.pid" % name) as f:
            return int(f.read())

    def mount(self, name):
        """Mounts by the line for /etc/fstab that `attach` printed."""
        self.shells[name].run("mkdir -p /mnt && echo '%s' >>/etc/fstab && mount /mnt" % self.fstab)

    def inspect(self):
        return json.loads(self.tombolo("zone", "inspect", self.zone, "--json"))

    def member(self, name):
        members = self.inspect()["members"]
        return next((m for m in members if m["name"] == name), None)

    def kill_server(self):
        with open("/run/tombolo-zones/%s/server.lock" % self.inspect()["uuid"]) as f:
            os.kill(int(f.read()), signal.SIGKILL)
        until("the zone's server lives", lambda: not self.inspect()["owned"])

    def ports(self):
        return self.tombolo("net", "ports", "--control", self.control)

    # The claims, in this order.

    def domains_are_defined_with_a_zone_and_a_port(self):
        for name in ("a", "b"):
            said = self.tombolo("libvirt", "attach", name, "--zone", self.zone, "--mount", "/mnt", "--network", self.control)
            self.fstab = next(line for line in said.splitlines() if " tombolo " in line)
        xml = run("virsh", "dumpxml", "a", "--inactive")
        for part in ("virtio-pmem-pci", "ivshmem-doorbell", "vhostuser", "urn:tombolo:domain:1", "maxMemory"):
            need(part in xml, "no %s in %s" % (part, xml))
        said = self.tombolo("libvirt", "attach", "a", "--zone", self.zone, good=False)
        need("already" in said, said)

    def the_rules_that_libvirt_gives_apparmor_have_both_sockets(self):
        uuid = run("virsh", "domuuid", "a").strip()
        with open(self.folder + "/a.now", "w") as f:
            f.write(run("virsh", "dumpxml", "a"))
        with open(self.folder + "/a.now") as f:
            done = subprocess.run(["/usr/lib/libvirt/virt-aa-helper", "--dryrun", "--replace", "-u", "libvirt-" + uuid], stdin=f, capture_output=True, text=True)
        rules = done.stdout + done.stderr
        socket_path = self.tombolo("zone", "invite", self.zone, "a", "--only", "qemu").split("path=")[-1].split()[0]
        # The zone's own file is in vm/libvirt/apparmor: libvirt 9.0 leaves virtio-pmem out.
        for path in (socket_path, "/run/tombolo-zones/ports/"):
            need(path in rules, "no rule for %s: %s" % (path, rules))

    def two_domains_start_and_share_the_zone(self):
        for name in ("a", "b"):
            self.start(name)
        for name in ("a", "b"):
            self.mount(name)
        self.shells["a"].run("echo hello >/mnt/file")
        need(self.shells["b"].run("cat /mnt/file") == "hello", "b does not see a's file")

    def the_domains_reach_each_other_over_the_switch(self):
        self.shells["a"].run("ping -c 3 -W 60 10.0.0.2")

    def a_domain_that_is_killed_loses_its_epoch_and_the_other_goes_on(self):
        before = self.member("a")
        os.kill(self.pid("a"), signal.SIGKILL)
        until("a's death was not noticed", lambda: self.member("a")["epoch"] > before["epoch"] and not self.member("a")["alive"])
        until("libvirt has not noticed", lambda: "shut off" in run("virsh", "domstate", "a"))
        self.shells["b"].run("echo back >/mnt/file")
        need("\na " not in self.ports() and not self.ports().startswith("a "), "a's port is still there: " + self.ports())

    def it_starts_again_as_the_same_member_with_its_port(self):
        before = self.member("a")
        self.start("a")
        self.mount("a")
        need(self.shells["a"].run("cat /mnt/file") == "back", "a does not see what b wrote")
        need(self.member("a")["id"] == before["id"], "a has another slot")
        self.shells["a"].run("ping -c 3 -W 60 10.0.0.2")

    def a_domain_outlives_its_zones_server_which_is_started_again_and_finds_it(self):
        before = {name: self.member(name) for name in ("a", "b")}
        need(not any(member["assumed"] for member in before.values()), "QEMU does not hold its slot: %s" % before)
        self.kill_server()
        said = self.tombolo("files", "fsck", "-y", self.zone, good=False)
        need("could mount it" in said, said)
        os.kill(self.pid("a"), signal.SIGKILL)
        until("a's slot is held", lambda: not self.member("a")["alive"])
        until("libvirt has not noticed", lambda: "shut off" in run("virsh", "domstate", "a"))
        self.shells["b"].run("echo still >/mnt/file")
        self.start("a")
        need(self.inspect()["owned"] and self.member("b") == before["b"], "the server has not found b: %s" % self.member("b"))
        self.mount("a")
        need(self.shells["a"].run("cat /mnt/file") == "still", "a does not see what b wrote")
        need(self.member("a")["id"] == before["a"]["id"], "a has another slot")
        self.shells["a"].run("echo back >/mnt/file")
        need(self.shells["b"].run("cat /mnt/file") == "back", "b does not see what a wrote")

    def a_zone_in_memory_that_the_hosts_reboot_took_is_made_anew_when_a_domain_starts(self):
        before = self.inspect()
        for name in ("a", "b"):
            run("virsh", "destroy", name)
        # As the reboot does: the zone's server, its records and its file.
        self.kill_server()
        shutil.rmtree("/run/tombolo-zones")
        os.unlink(self.zone)
        self.start("a")
        self.mount("a")
        after = self.inspect()
        need((after["uuid"], after["size"]) == (before["uuid"], before["size"]), "%s is another zone than %s" % (after, before))
        need(self.shells["a"].run("ls -A /mnt") == "", "the zone is not empty")
        self.shells["a"].run("echo back >/mnt/file")
        self.start("b")
        self.mount("b")
        need(self.shells["b"].run("cat /mnt/file") == "back", "b has another zone than a")

    def a_domain_has_two_zones_of_one_name_and_not_a_copy_of_one(self):
        copy = self.folder + "/copy.zone"
        shutil.copyfile(self.zone, copy)
        said = self.tombolo("libvirt", "attach", "a", "--zone", copy, good=False)
        need("could not tell them apart" in said, said)
        self.tombolo("zone", "create", self.second, "--size", "32M")
        self.tombolo("files", "mkfs", self.second)
        said = self.tombolo("libvirt", "attach", "a", "--zone", self.second, "--mount", "/mnt2")
        uuid = next(line for line in said.splitlines() if " tombolo " in line).split()[0]
        run("virsh", "destroy", "a")
        self.start("a")
        self.mount("a")
        self.shells["a"].run("mkdir -p /mnt2 && mount -t tombolo -o nosuid,nodev %s /mnt2 && echo other >/mnt2/file" % uuid)
        need(self.shells["a"].run("cat /mnt/file") == "back", "the zones are mixed up")

    def a_domain_does_not_start_without_its_switch_and_says_so(self):
        run("virsh", "destroy", "a")
        self.switch.terminate()
        self.switch.wait()
        said = run("virsh", "start", "a", good=False)
        need("the switch does not run" in said and "tombolo net run" in said, said)

    def all_is_given_back(self):
        run("virsh", "destroy", "b")
        self.tombolo("libvirt", "detach", "a", "--zone", self.second)
        for name in ("a", "b"):
            self.tombolo("libvirt", "detach", name, "--zone", self.zone, "--network", self.control)
            xml = run("virsh", "dumpxml", name, "--inactive")
            need("tombolo" not in xml.replace("tombolo.ip", ""), xml)
        need(self.member("a") is None and self.member("b") is None, "a slot is left")
        sockets = lambda: [f for _, _, files in os.walk("/run/tombolo-zones") for f in files if f.endswith(".sock")]
        until("sockets are left: %s" % sockets(), lambda: not sockets())
        need(os.stat(self.zone).st_uid == 0, "the zone's file has another owner now")
        for zone in (self.zone, self.second):
            # The server of a zone ends after it has removed its last socket.
            until("the server of %s lives" % zone, lambda: not json.loads(self.tombolo("zone", "inspect", zone, "--json"))["owned"])
            self.tombolo("zone", "rm", zone)

    def a_domain_gets_a_zone_by_the_commands_of_the_page(self):
        self.define("web", "10.0.0.5")
        path = os.path.dirname(self.program) + ":" + os.environ["PATH"]
        done = subprocess.run([sys.executable, PAGES, "run", "libvirt.md", "libvirt"], cwd=self.folder, env=dict(os.environ, PATH=path), capture_output=True, text=True)
        need(done.returncode == 0, done.stdout + done.stderr)
        web = self.shells["web"] = Shell(self.folder + "/web.serial")
        zone = json.loads(self.tombolo("zone", "inspect", "/dev/shm/own.zone", "--json"))
        # The line for /etc/fstab that the page speaks of.
        web.run("mkdir -p /srv/shared && echo '%s /srv/shared tombolo nosuid,nodev,nofail 0 0' >>/etc/fstab && mount /srv/shared && echo x >/srv/shared/file" % zone["uuid"])
        run("virsh", "destroy", "web")
        self.tombolo("libvirt", "detach", "web", "--zone", "/dev/shm/own.zone")
        until("the zone's server lives", lambda: not json.loads(self.tombolo("zone", "inspect", "/dev/shm/own.zone", "--json"))["owned"])
        self.tombolo("zone", "rm", "/dev/shm/own.zone")

    def a_domain_whose_memory_is_not_shared_is_refused_with_the_remedy(self):
        xml = DOMAIN.format(name="c", folder=self.folder, address="10.0.0.3").replace("<vcpu>", "<memoryBacking><access mode='private'/></memoryBacking><vcpu>")
        with open(self.folder + "/c.xml", "w") as f:
            f.write(xml)
        run("virsh", "define", self.folder + "/c.xml")
        said = self.tombolo("libvirt", "attach", "c", "--network", self.control, good=False)
        need("private" in said and "virsh edit c" in said, said)
        said = self.tombolo("libvirt", "attach", "nobody", "--grow", good=False)
        need("nobody" in said, said)

    def a_domain_lies_on_the_hosts_topology(self):
        with open(self.folder + "/d.xml", "w") as f:
            f.write(DOMAIN.format(name="d", folder=self.folder, address="10.0.0.4").replace("<vcpu>2<", "<vcpu>1<"))
        run("virsh", "define", self.folder + "/d.xml")
        with open(self.folder + "/placed.xml", "w") as f:
            f.write(self.tombolo("topology", "libvirt", "d"))
        run("virsh", "define", "--validate", self.folder + "/placed.xml")
        run("virsh", "start", "d")
        with open("/proc/%d/task/%d/status" % (self.pid("d"), self.vcpu("d"))) as f:
            allowed = next(line.split()[1] for line in f if line.startswith("Cpus_allowed_list"))
        need("<vcpupin vcpu='0' cpuset='%s'/>" % allowed in run("virsh", "dumpxml", "d"), "the vCPU's thread may run on CPUs " + allowed)
        run("virsh", "destroy", "d")

    def vcpu(self, name):
        """The thread of a domain's first vCPU."""
        for task in os.listdir("/proc/%d/task" % self.pid(name)):
            with open("/proc/%d/task/%s/comm" % (self.pid(name), task)) as f:
                if f.read().startswith("CPU 0"):
                    return int(task)
        raise Failed("QEMU has no thread of a vCPU")


CLAIMS = [
    World.domains_are_defined_with_a_zone_and_a_port,
    World.the_rules_that_libvirt_gives_apparmor_have_both_sockets,
    World.two_domains_start_and_share_the_zone,
    World.the_domains_reach_each_other_over_the_switch,
    World.a_domain_that_is_killed_loses_its_epoch_and_the_other_goes_on,
    World.it_starts_again_as_the_same_member_with_its_port,
    World.a_domain_outlives_its_zones_server_which_is_started_again_and_finds_it,
    World.a_zone_in_memory_that_the_hosts_reboot_took_is_made_anew_when_a_domain_starts,
    World.a_domain_has_two_zones_of_one_name_and_not_a_copy_of_one,
    World.a_domain_does_not_start_without_its_switch_and_says_so,
    World.all_is_given_back,
    World.a_domain_gets_a_zone_by_the_commands_of_the_page,
    World.a_domain_whose_memory_is_not_shared_is_refused_with_the_remedy,
    World.a_domain_lies_on_the_hosts_topology,
]


def be_init():
    """Goes on in a child process; this one, the first of its PID namespace, takes in processes whose parents have ended, and ends with the child."""
    own = os.fork()
    while own:
        pid, status = os.wait()
        if pid == own:
            os._exit(os.waitstatus_to_exitcode(status) & 0xff)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tombolo", required=True)
    parser.add_argument("--kit", required=True)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.inside:
        if os.geteuid() != 0:
            sys.exit("libvirtd.py: needs root")
        # The mounts below and every process end with the namespaces.
        mounts = "mount --make-rprivate / && mount -t tmpfs tmpfs /run && mount -t tmpfs tmpfs /dev/shm"
        for folder in ("/etc/libvirt", "/var/lib/libvirt", "/var/cache/libvirt", "/var/log/libvirt"):
            mounts += " && mkdir -p %s && mount -t tmpfs tmpfs %s" % (folder, folder)
        # Debian's package libvirt-daemon-system makes this user; this machine may not have it.
        for file, line in (("passwd", "libvirt-qemu:x:64055:64055::/var/lib/libvirt:/usr/sbin/nologin"), ("group", "libvirt-qemu:x:64055:")):
            mounts += " && { sed /^libvirt-qemu:/d /etc/%s; echo %s; } >/run/%s && mount --bind /run/%s /etc/%s" % (file, line, file, file, file)
        again = [sys.executable, os.path.abspath(__file__), "--tombolo", os.path.abspath(options.tombolo), "--kit", os.path.abspath(options.kit), "--inside"]
        words = ["unshare", "--mount", "--net", "--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-c", mounts + ' && ip link set lo up && exec "$@"', "sh"]
        os.execvp("unshare", words + again)
    be_init()
    passed = failed = 0
    try:
        world = World(options.tombolo, options.kit)
    except Failed as e:
        sys.exit("0 passed, 1 failed\n%s" % e)
    for claim in CLAIMS:
        words = claim.__name__.replace("_", " ")
        try:
            claim(world)
        except Failed as e:
            failed += 1
            print("FAILED  %s\n  | %s" % (words, str(e).replace("\n", "\n  | ")), flush=True)
            # The later claims begin where this one should have ended.
            break
        passed += 1
        print("ok      %s" % words, flush=True)
    if failed:
        with open(world.folder + "/libvirtd.log") as f:
            print("  | " + "  | ".join([line for line in f if "ethtool" not in line][-15:]))
    print("%d passed, %d failed" % (passed, failed))
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
