// SPDX-License-Identifier: Apache-2.0 OR MIT
//! An accelerator that a VM owns, with real guests under TCG: PoCL is the owner's device, with what it needs at run time
//! (packages/accel.list) in the owner's image; the clients have the client library only.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, ChildStdout, Stdio};
use std::time::{Duration, Instant};

use common::{Lab, TIMEOUT, signal};
use serde_json::Value;

mod attack;
#[path = "../common/mod.rs"]
mod common;
mod images;
#[path = "../common/opencl.rs"]
mod opencl;

/// The API's code for a device whose server has gone.
const LOST: &str = "failed -5\n";

/// The VM `owner` with such an image, and the clients a and b.
fn lab(owner: &Path) -> Lab {
    Lab::new(&format!(
        r#"
[accel.gpu]
vm = "owner"
memory = "64M"
window = "16M"
channels = 2
[vm.owner]
kernel = "6.1"
initrd = "{}"
memory = "1536M"
qemu_args = ["-cpu", "max,-erms,-fsrm,-cx16,-avx"]
[vm.a]
kernel = "6.1"
initrd = "{client}"
memory = "256M"
accelerators = ["gpu"]
[vm.b]
kernel = "6.1"
initrd = "{client}"
memory = "256M"
accelerators = {{ gpu = {{ weight = 25 }} }}
"#,
        owner.display(),
        client = images::client().display()
    ))
}

fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < TIMEOUT, "{what} never came");
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn accelerator(lab: &Lab) -> Value {
    lab.ps()["accelerators"][0].clone()
}

/// A VM's entry of `ps`.
fn vm(lab: &Lab, name: &str) -> Value {
    let ps = lab.ps();
    ps["vms"].as_array().unwrap().iter().find(|vm| vm["name"] == name).expect("it was started").clone()
}

fn shell(lab: &Lab, vm: &str, script: &str) -> String {
    lab.good(&["exec", vm, "--", "sh", "-c", script])
}

/// Clients of a and of b, as the owner's agent says in time, or not.
fn clients(lab: &Lab) -> [Option<u64>; 2] {
    let gpu = accelerator(lab);
    [0, 1].map(|n| gpu["vms"][n]["clients"].as_u64())
}

/// Checks the output of `steady` in a VM. With `kernel` it compiles one, which takes long under emulation.
fn computes(lab: &Lab, vm: &str, how: &str) {
    let output = lab.run(&["exec", vm, "--", "steady", how]);
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(out, "right\n", "{vm}: {err}");
}

/// A program that computes in a VM until its device is lost, and has begun to.
struct Steady {
    exec: Child,
    said: BufReader<ChildStdout>,
}

impl Steady {
    fn begin(lab: &Lab, vm: &str) -> Steady {
        let mut command = lab.command(&["exec", vm, "--", "steady", "forever"]);
        let mut exec = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut said = BufReader::new(exec.stdout.take().unwrap());
        let mut line = String::new();
        said.read_line(&mut line).unwrap();
        assert_eq!(line, "right\n", "{vm}");
        Steady { exec, said }
    }

    /// It computes still.
    fn assert_runs(&mut self) {
        assert!(self.exec.try_wait().unwrap().is_none(), "it ended");
    }

    /// Waits until it has ended, and compares what it says then with what programs of the host say whose server was killed.
    fn assert_device_lost(mut self) {
        let mut rest = String::new();
        self.said.read_to_string(&mut rest).unwrap();
        let mut why = String::new();
        self.exec.stderr.take().unwrap().read_to_string(&mut why).unwrap();
        assert_eq!(rest, LOST, "{why}");
        assert!(why.contains("the accelerator server was lost"), "{why}");
        self.exec.wait().unwrap();
    }
}

/// The number of times that a process's threads slept, all together.
fn wakeups(pid: u64) -> u64 {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let status = tasks.map(|task| std::fs::read_to_string(task.unwrap().path().join("status")).unwrap());
    status.map(|text| field(&text, "voluntary_ctxt_switches:")).sum()
}

fn field(status: &str, name: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix(name)).expect(name);
    line.trim().parse().unwrap()
}

/// Words for a shell in the owner: the pids of its server and of that one's workers.
const PROCESSES: &str = r#"named() { grep -lsx "$1" /proc/[0-9]*/comm | cut -d/ -f3; }
workers=$(named accel-worker)
for p in $(named tombolo); do tr '\0' ' ' </proc/$p/cmdline | grep -q 'accel serve' && server=$p; done
"#;

fn workers(lab: &Lab) -> usize {
    shell(lab, "owner", &format!("{PROCESSES} echo $workers")).split_whitespace().count()
}

/// The host keeps zones and consoles, and no process of it takes part in calls: while a makes thousands that wait, the supervisor is woken for
/// what it does each second and for a's console.
fn no_process_of_the_host_takes_part(lab: &Lab) {
    const CALLS: u64 = 5000;
    let ps = lab.ps();
    let qemus = ps["vms"].as_array().unwrap().iter().map(|vm| vm["pid"].as_u64().unwrap());
    let supervisor = ps["supervisor"].as_u64().unwrap();
    let mut expected: Vec<u64> = qemus.chain([supervisor]).collect();
    expected.sort_unstable();
    shell(lab, "a", &format!("steady calls {CALLS} >/dev/console 2>&1 </dev/null &"));
    let console = || lab.good(&["logs", "a"]).replace('\r', "");
    wait_until("the first result", || console().contains("right\n"));
    let shims: Vec<u32> = lab.shims().into_values().collect();
    let others = lab.processes().into_iter().filter(|process| !shims.contains(process));
    let mut processes: Vec<u64> = others.map(u64::from).collect();
    processes.sort_unstable();
    assert_eq!(processes, expected, "the supervisor and QEMUs");
    let before = wakeups(supervisor);
    wait_until("the calls' end", || console().contains("right\ndone\n"));
    let woken = wakeups(supervisor) - before;
    assert!(woken < CALLS / 2, "woken {woken} times during {CALLS} calls");
}

/// Waits until so many processes that serve in the owner come to rest: none of their threads runs in five seconds of the guest's time.
fn assert_rests(lab: &Lab, processes: usize) {
    wait_until("rest", || {
        let (before, after) = looks_at_the_owner(lab);
        assert_eq!(before.lines().count(), processes, "{before}");
        before == after
    });
}

/// A line for each process that serves in the owner, before and after five seconds of the guest's time: how often its threads were woken, and
/// their processor time in ticks. The thread that answers `accel ls` is left out, as others may ask.
fn looks_at_the_owner(lab: &Lab) -> (String, String) {
    let look = r#"look() {
        for p in $server $workers; do
            for t in /proc/$p/task/*; do
                [ "$(cat $t/comm)" = control ] || cat $t/status $t/stat
            done | awk '/^voluntary/ { woken += $2 } /^[0-9]+ \(/ { ticks += $14 + $15 } END { print woken, ticks }'
        done
    }"#;
    let said = shell(lab, "owner", &format!("{PROCESSES}{look}\nlook; sleep 5; echo then; look"));
    let (before, after) = said.split_once("then\n").expect("two looks");
    (before.to_owned(), after.to_owned())
}

/// Without a client, and with one that is idle, server and worker rest.
fn nobody_runs_while_nobody_calls(lab: &Lab) {
    wait_until("the last worker's end", || workers(lab) == 0);
    assert_rests(lab, 1);

    let mut holds = lab.command(&["exec", "-i", "a", "--", "hold", "4"]);
    let mut holds = holds.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(holds.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "0\n");
    assert_rests(lab, 2);
    wait_until("a's client", || clients(lab) == [Some(1), Some(0)]);
    drop(holds.stdin.take());
    assert!(holds.wait().unwrap().success());
    wait_until("the worker's end", || workers(lab) == 0);
}

/// The server in the owner is killed: its clients' programs end, the next ones are served.
fn a_killed_server_is_followed_by_another(lab: &Lab) {
    let steady = Steady::begin(lab, "b");
    shell(lab, "owner", &format!("{PROCESSES}kill -9 $server"));
    steady.assert_device_lost();
    wait_until("another server", || accelerator(lab)["vms"][1]["served"] == true);
    computes(lab, "b", "once");
}

/// The owner ends in some way while a computes; it is started again, and a, which is the same VM as before, computes.
fn the_owner_ends(lab: &Lab, how: &str, end: impl FnOnce()) {
    let a = vm(lab, "a")["pid"].clone();
    let steady = Steady::begin(lab, "a");
    end();
    steady.assert_device_lost();
    wait_until("the owner's end", || vm(lab, "owner")["state"].as_str().unwrap().starts_with("ended"));
    assert_eq!(accelerator(lab)["state"], "'owner' is not up", "{how}");
    let output = lab.run(&["exec", "a", "--", "steady", "once"]);
    let why = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && why.contains("no server serves it now"), "{how}: {why}");
    lab.good(&["up"]);
    computes(lab, "a", "once");
    assert_eq!(vm(lab, "a")["pid"], a, "{how}");
}

/// A client VM is killed: what it had in the owner is gone, and the other client computes on.
fn a_killed_client_leaves_nothing(lab: &Lab) {
    let of_a = Steady::begin(lab, "a");
    let of_b = Steady::begin(lab, "b");
    assert_eq!(workers(lab), 2);
    signal(u32::try_from(vm(lab, "b")["pid"].as_u64().unwrap()).unwrap(), "KILL");
    wait_until("the end of b's worker", || workers(lab) == 1);
    wait_until("a's client alone", || clients(lab) == [Some(1), Some(0)]);
    drop(of_b);
    shell(lab, "a", "killall steady");
    drop(of_a);
    wait_until("the end of a's worker", || workers(lab) == 0);
}

#[test]
fn a_vm_serves_its_device_to_others_and_its_deaths_are_survived() {
    let lab = lab(&images::owner("6.1"));
    lab.good(&["up"]);
    let gpu = accelerator(&lab);
    assert_eq!(
        (&gpu["owner"], &gpu["pid"], &gpu["state"]),
        (&"owner".into(), &Value::Null, &"serving".into())
    );
    computes(&lab, "a", "kernel");
    computes(&lab, "b", "kernel");
    wait_until("its line", || lab.good(&["accel", "ls"]).contains(" in the VM owner at vm:a vm:b"));
    // A client has two channels; those of processes that ended come back.
    for _ in 0..3 {
        computes(&lab, "a", "once");
    }
    no_process_of_the_host_takes_part(&lab);
    nobody_runs_while_nobody_calls(&lab);
    a_killed_server_is_followed_by_another(&lab);
    let qemu = u32::try_from(vm(&lab, "owner")["pid"].as_u64().unwrap()).unwrap();
    the_owner_ends(&lab, "killed", || signal(qemu, "KILL"));
    the_owner_ends(&lab, "panicked", || {
        lab.run(&["exec", "owner", "--", "sh", "-c", "echo c >/proc/sysrq-trigger"]);
    });
    a_killed_client_leaves_nothing(&lab);
    lab.good(&["down"]);
    lab.assert_nothing_left();
}

#[test]
fn an_owner_that_reboots_serves_again_by_itself_and_a_client_that_reboots_is_served_again() {
    let lab = lab(&images::owner("6.1"));
    lab.good(&["up"]);
    let steady = Steady::begin(&lab, "a");
    lab.run(&["exec", "owner", "--", "reboot"]);
    steady.assert_device_lost();
    let again = |name: &str| {
        let vm = vm(&lab, name);
        vm["reboots"] == 1 && vm["state"] == "up"
    };
    wait_until("the owner's reboot", || again("owner"));
    computes(&lab, "a", "once");
    assert_eq!(accelerator(&lab)["starts"], 2);
    lab.run(&["exec", "b", "--", "reboot"]);
    wait_until("the client's reboot", || again("b"));
    computes(&lab, "b", "once");
    lab.good(&["down"]);
    lab.assert_nothing_left();
}

#[test]
fn an_owner_without_a_device_and_one_that_is_not_up_are_named_with_the_remedy() {
    let lab = lab(images::bare());
    let output = lab.run(&["up", "a"]);
    let err = String::from_utf8_lossy(&output.stderr);
    assert!(
        !output.status.success() && err.contains("which the VM 'owner' owns, and that is not up"),
        "{err}"
    );
    assert!(err.contains("tombolo up owner a") && !err.contains("a: starting"), "{err}");
    lab.assert_nothing_left();
    let output = lab.run(&["up", "owner"]);
    let err = String::from_utf8_lossy(&output.stderr);
    assert!(
        !output.status.success() && err.contains("the VM 'owner' owns accel.gpu, but has nothing to serve"),
        "{err}"
    );
    assert!(err.contains("pocl-opencl-icd"), "{err}");
    lab.assert_nothing_left();
}
