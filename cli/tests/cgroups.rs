// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `cpu_limit`, `memory_limit` and `isolate` on a kernel with cgroups of version 2, and the commands of docs/vms.md about limits: this program runs in a guest, with a stand-in for QEMU.

use std::path::Path;
use std::process::Command;

use common::{Lab, page};

mod common;

/// The begin of every script: mounts the image of [`tools`] and the cgroups, and makes /tmp/p the folder of the project.
const PREPARE: &str = "set -e
modprobe ext4
mkdir -p /mnt /tmp/p
mount -o ro /dev/vda /mnt
mount -t cgroup2 none /sys/fs/cgroup
cd /tmp/p
cp /mnt/tombolo.toml /mnt/qemu /mnt/kernel .
export LD_LIBRARY_PATH=/mnt/lib TOMBOLO_HYPERVISOR=tcg XDG_RUNTIME_DIR=/tmp/p XDG_STATE_HOME=/tmp/p
";

/// Runs `up` in the cgroup `unit`, as in a unit with Delegate=yes, and then below a cgroup that the environment names, in which a supervisor that was
/// killed has left one.
const IN_GUEST: &str = r#"
echo '+cpu +memory' >/sys/fs/cgroup/cgroup.subtree_control
mkdir /sys/fs/cgroup/unit /sys/fs/cgroup/named
sh -c 'echo $$ >/sys/fs/cgroup/unit/cgroup.procs; /mnt/tombolo up; /mnt/tombolo up' 2>&1 || echo "first $?"
TOMBOLO_CGROUP=/sys/fs/cgroup/named /mnt/tombolo up 2>&1 || echo "second $?"
mkdir /sys/fs/cgroup/named/tombolo-killed-0123abcd-a
/mnt/tombolo clean
find /sys/fs/cgroup -mindepth 2 -type d"#;

/// The stand-in: it says its cgroup and the limits there, and ends.
const QEMU: &str = r#"#!/bin/sh
[ "$1" != --version ] || { echo "QEMU emulator version 10.0.0"; exit; }
group=/sys/fs/cgroup$(sed -n 's/^0:://p' /proc/self/cgroup)
echo "in $group with $(cat "$group/cpu.max"), $(cat "$group/memory.max")"
exit 1
"#;

/// An image with this program, the libraries that it needs, a compose file, and a stand-in for QEMU.
fn tools(lab: &Lab, compose: &str, qemu: &str) {
    let stage = lab.dir.path().join("stage");
    let program = env!("CARGO_BIN_EXE_tombolo");
    std::fs::create_dir_all(stage.join("lib")).unwrap();
    std::fs::copy(program, stage.join("tombolo")).unwrap();
    // It needs no library that this program does not need.
    std::fs::copy("/usr/bin/flock", stage.join("flock")).expect("the package util-linux");
    let libraries = Command::new("ldd").arg(program).output().unwrap();
    for word in String::from_utf8(libraries.stdout).unwrap().split_whitespace().filter(|w| w.starts_with('/'))
    {
        let library = Path::new(word);
        std::fs::copy(library, stage.join("lib").join(library.file_name().unwrap())).unwrap();
    }
    let compose =
        format!("overcommit = true\nqemu = \"./qemu\"\n{compose}kernel = \"./kernel\"\nmemory = \"128M\"\n");
    for (name, text) in [("tombolo.toml", compose.as_str()), ("qemu", qemu), ("kernel", "")] {
        std::fs::write(stage.join(name), text).unwrap();
    }
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(stage.join("qemu"), mode).unwrap();
    let made = Command::new("mke2fs")
        .env("PATH", "/usr/sbin:/sbin:/usr/bin:/bin")
        .args(["-q", "-t", "ext4", "-d"])
        .args([&stage, &lab.dir.path().join("tools.img")])
        .arg("256M")
        .output()
        .expect("the package e2fsprogs");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
}

#[test]
fn a_qemu_is_in_a_cgroup_with_its_limits_which_goes_with_it() {
    let lab = Lab::new(
        "[vm.a]\nkernel = \"6.1\"\nmemory = \"512M\"\ndisks = [{ path = \"tools.img\", readonly = true }]\n",
    );
    tools(&lab, "[vm.a]\ncpu_limit = 1.5\nmemory_limit = \"256M\"\n", QEMU);
    lab.good(&["up"]);
    let said = lab.good(&["exec", "a", "--", "sh", "-c", &[PREPARE, IN_GUEST].concat()]);
    let places: Vec<&str> =
        said.lines().filter_map(|line| line.trim().strip_prefix("| in /sys/fs/cgroup/")).collect();
    // Each is said once, by the QEMU that did not start.
    assert_eq!(places.len(), 3, "{said}");
    for (place, parent) in places.iter().zip(["unit/tombolo-p-", "unit/tombolo-p-", "named/tombolo-p-"]) {
        assert!(place.starts_with(parent) && place.ends_with("-a with 150000 100000, 268435456"), "{said}");
    }
    assert!(said.contains("first 1") && said.contains("second 1"), "{said}");
    let left: Vec<&str> = said.lines().filter(|line| line.starts_with("/sys/fs/cgroup/")).collect();
    assert_eq!(left, ["/sys/fs/cgroup/unit/supervisor"], "{said}");
    assert!(
        said.contains("removed /sys/fs/cgroup/named/tombolo-killed-0123abcd-a (the cgroup of a VM"),
        "{said}"
    );
    lab.good(&["down"]);
}

#[test]
fn limits_are_set_and_go_by_the_commands_of_the_guide() {
    let commands = page::commands("vms.md", "guest");
    assert!(commands.len() > 4, "{commands:?}");
    let lab = Lab::new(
        "[vm.a]\nkernel = \"6.1\"\nmemory = \"512M\"\ndisks = [{ path = \"tools.img\", readonly = true }]\n",
    );
    tools(&lab, &(page::file("vms.md", "limited.toml") + "ready = \"running\"\n"), ONE_VCPU);
    lab.good(&["up"]);
    // As systemd sets it up.
    let mut script = format!("{PREPARE}echo '+cpu +memory' >/sys/fs/cgroup/cgroup.subtree_control\n");
    script.push_str("mv tombolo.toml limited.toml\nexport PATH=$PATH:/mnt\n");
    let mut expected = String::new();
    for (n, (command, output)) in commands.iter().enumerate() {
        script.push_str(&format!("echo '-- {n}'\n{command}\n"));
        expected.push_str(&format!("-- {n}\n{output}"));
    }
    assert_eq!(lab.good(&["exec", "a", "--", "sh", "-c", &script]), expected);
    lab.good(&["down"]);
}

/// Isolates a CPU, gives it back by `down`, by `clean` after a crash, and by the next `up` after another one; then what is refused, and `ps` and `down` while
/// another process has the lock that an isolation takes.
const ISOLATION: &str = r#"
cd /sys/fs/cgroup
echo '+cpu +memory +cpuset' >cgroup.subtree_control
mkdir -p unit plain/inner
export TOMBOLO_CGROUP=/sys/fs/cgroup/unit
cpus() { sed -n 's/^Cpus_allowed_list:[[:space:]]*//p' "/proc/$1/status"; }
state() {
	echo "$1: isolated $(cat /sys/fs/cgroup/cpuset.cpus.isolated), ours $(cpus $$), handed down $(cat unit/cpuset.cpus.exclusive), groups $(find unit -mindepth 1 -type d | wc -l), records $(find /tmp/p/tombolo/partitions -type f | wc -l)"
}
crash() {
	supervisor=$(/mnt/tombolo ps --json | sed -n 's/.*"supervisor": *\([0-9]*\).*/\1/p' | head -n 1)
	shim=$(sed -n 's/^PPid:[[:space:]]*//p' "/proc/$(cat /tmp/p/vcpu)/status")
	kill -9 "$supervisor" "$shim"
	while [ -d "/proc/$(cat /tmp/p/vcpu)" ]; do sleep 0.1; done
}
tombolo() { (cd /tmp/p; /mnt/tombolo "$@" 2>&1); }
mkdir -p /tmp/p/tombolo/partitions
chmod 700 /tmp/p/tombolo
cd /sys/fs/cgroup
tombolo topology plan
tombolo up
state up
echo "vCPU: CPUs $(cpus "$(cat /tmp/p/vcpu)") in $(cut -d: -f3 "/proc/$(cat /tmp/p/vcpu)/cgroup")"
tombolo topology show
tombolo restart a
state restarted
tombolo down
state down
tombolo up
cd /tmp/p; crash; cd /sys/fs/cgroup
state crashed
tombolo clean --dry-run
tombolo clean
state cleaned
tombolo up
cd /tmp/p; crash; cd /sys/fs/cgroup
tombolo up
state successor
tombolo down
state end
tombolo up
cd /tmp/p; crash; cd /sys/fs/cgroup
tombolo down
state stopped
tombolo up
cd /tmp/p; crash; cd /sys/fs/cgroup
sleep 1000 &
echo $! >"$(echo unit/tombolo-*)/cgroup.procs"
tombolo down || echo "a cgroup stays: $?"
kill $!
tombolo down && state emptied
mkdir -p /run/tombolo/passthrough
echo '{' >/run/tombolo/passthrough/0000:00:1f.7.json
tombolo down || echo "a device stays: $?"
rm /run/tombolo/passthrough/0000:00:1f.7.json
TOMBOLO_CGROUP=/sys/fs/cgroup/plain/inner tombolo up || state refused
exec 9>unit/cgroup.kill
while :; do
	/mnt/flock 9
	rm -f /tmp/p/asked
	tombolo up &
	until [ -e /tmp/p/asked ]; do kill -0 $!; sleep 0.1; done
	tombolo ps --wait 10
	if kill -0 $!; then break; fi
	echo 'the wait for the lock has ended meanwhile, so this is repeated'
	tombolo down
done
/mnt/flock -u 9
wait $!
tombolo ps --wait 60
/mnt/flock 9
tombolo down && echo 'down has not waited for the lock'
/mnt/flock -u 9
until tombolo down; do sleep 0.1; done
tombolo clean
state unlocked
"#;

/// A stand-in with one thread, which is the vCPU.
const ONE_VCPU: &str = r#"#!/bin/sh
[ "$1" != --version ] || { echo "QEMU emulator version 10.0.0"; exit; }
for word; do
	case $word in socket,id=monitor,fd=*) fd=${word#*fd=} ;; esac
done
exec 0<&"$fd" 1>&"$fd"
echo $$ >/tmp/p/vcpu
echo '{"QMP": {"version": {}, "capabilities": []}}'
while read -r line; do
	id=$(printf %s "$line" | sed -n 's/.*"id": *\([0-9]*\).*/\1/p')
	reply='{}'
	case $line in
		*query-cpus-fast*) echo >/tmp/p/asked; reply='[{"cpu-index": 0, "thread-id": '$$', "props": {"socket-id": 0, "core-id": 0, "thread-id": 0}}]' ;;
	esac
	echo '{"return": '"$reply"', "id": '"$id"'}'
	case $line in *'"quit"'*) exit ;; esac
done
"#;

#[test]
fn the_cpus_of_an_isolated_vm_are_its_own_until_it_ends_however_that_comes_about() {
    let lab = Lab::new(
        "[vm.a]\nkernel = \"6.12\"\ncpus = 2\nmemory = \"512M\"\ndisks = [{ path = \"tools.img\", readonly = true }]\n",
    );
    let compose =
        "reserve = 1\n[vm.a]\ntopology = \"close\"\ncpus = 1\nisolate = true\nready = \"running\"\n";
    tools(&lab, compose, ONE_VCPU);
    lab.good(&["up"]);
    let said = lab.good(&["exec", "a", "--", "sh", "-c", &[PREPARE, ISOLATION].concat()]);
    let free = "isolated , ours 0-1, handed down , groups 0, records 0";
    let taken = "isolated 1, ours 0, handed down 1, groups 2, records 1";
    let states = [
        ("up", taken),
        ("restarted", taken),
        ("down", free),
        ("crashed", taken),
        ("cleaned", free),
        ("successor", taken),
        ("end", free),
        ("stopped", free),
        ("emptied", free),
        ("refused", free),
        ("unlocked", free),
    ];
    for (when, state) in states {
        assert!(said.contains(&format!("{when}: {state}\n")), "{when}: {state} is not in\n{said}");
    }
    for words in [
        "isolated for a: CPUs 1\n",
        "CPU 0 (QEMU of a)\n",
        "CPU 1 (a)\n",
        "vCPU: CPUs 1 in /unit/tombolo-p-",
        "a   booting",
        "a   up",
        "the VM 'a' has ended, and what it had of the host, such as its CPUs, is not given back yet",
        "-a/vcpus\n",
        "would give the CPUs of /sys/fs/cgroup/unit/tombolo-p-",
        "-a given back: their VM died\n",
        "can't be removed; see /sys/fs/cgroup/unit/tombolo-p-",
        "a cgroup stays: 1\n",
        "the record /run/tombolo/passthrough/0000:00:1f.7.json is damaged",
        "a device stays: 1\n",
        "vm.a.isolate: the cgroup /sys/fs/cgroup/plain/inner lacks the controller cpuset; as root: echo +cpuset >/sys/fs/cgroup/plain/cgroup.subtree_control",
    ] {
        assert!(said.contains(words), "{words} is not in\n{said}");
    }
    lab.good(&["down"]);
}

/// Freezes the cgroup of a VM's QEMU, and the one above it before a start.
const FREEZER: &str = r#"
cd /sys/fs/cgroup
echo '+cpu +memory' >cgroup.subtree_control
mkdir unit
export TOMBOLO_CGROUP=/sys/fs/cgroup/unit
tombolo() { (cd /tmp/p; /mnt/tombolo "$@" 2>&1); }
freeze() {
	echo 1 >"$1/cgroup.freeze"
	until grep -q 'frozen 1' "$1/cgroup.events"; do sleep 0.1; done
}
tombolo up
freeze unit/tombolo-*
tombolo ps
tombolo down && echo 'stopped'
freeze unit
tombolo up || echo 'refused'
echo 0 >unit/cgroup.freeze
tombolo up && echo 'goes on'
tombolo down
find unit -mindepth 1 -type d
"#;

#[test]
fn a_frozen_cgroup_is_named_where_its_process_does_not_answer_and_before_one_would_begin_there() {
    let lab = Lab::new(
        "[vm.a]\nkernel = \"6.1\"\nmemory = \"512M\"\ndisks = [{ path = \"tools.img\", readonly = true }]\n",
    );
    tools(&lab, "[vm.a]\ncpu_limit = 1.5\nready = \"running\"\n", ONE_VCPU);
    lab.good(&["up"]);
    let said = lab.good(&["exec", "a", "--", "sh", "-c", &[PREPARE, FREEZER].concat()]);
    let mut rest = said.as_str();
    for words in [
        "is in the frozen cgroup /sys/fs/cgroup/unit/tombolo-p-",
        "-a/cgroup.freeze)",
        "\nstopped\n",
        "the cgroup /sys/fs/cgroup/unit is frozen, so QEMU would not begin there; echo 0 >/sys/fs/cgroup/unit/cgroup.freeze",
        "\nrefused\n",
        "\ngoes on\n",
    ] {
        let at = rest.find(words);
        rest = &rest[at.unwrap_or_else(|| panic!("{words} is not in\n{said}")) + words.len() - 1..];
    }
    assert!(!rest.contains("unit/tombolo-"), "{said}");
    lab.good(&["down"]);
}
