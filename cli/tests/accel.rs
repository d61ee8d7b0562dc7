// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Accelerators of a compose file, with real guests as a user has them; PoCL is the host's device (packages/accel.list). Under TCG, with
//! the guest kit's 6.1 kernel.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use common::{Lab, TIMEOUT, assert_names_the_missing_module, page, signal};
use opencl::{client_library, done, image, program};
use serde_json::Value;

mod common;
#[path = "../../accel/tests/kernels.rs"]
mod kernels;
#[path = "common/opencl.rs"]
mod opencl;

/// A command with the native driver, the same one for all, whatever memory happens to be free.
fn native(mut command: Command) -> Command {
    command.env("POCL_CACHE_DIR", kernels::folder()).env("POCL_MEMORY_LIMIT", "2");
    command.env_remove("OCL_ICD_VENDORS");
    command
}

/// The program that makes calls and prints what they answer.
fn calls() -> &'static Path {
    static CALLS: OnceLock<PathBuf> = OnceLock::new();
    CALLS.get_or_init(|| program("calls"))
}

/// The kit's guest with clinfo, programs of the accelerators' tests, and the client library as a user installs it.
fn guest_image() -> &'static Path {
    static IMAGE: OnceLock<PathBuf> = OnceLock::new();
    IMAGE.get_or_init(|| {
        let mut items = vec!["clinfo".to_owned()];
        items.extend([calls(), &program("hold")].map(|program| program.display().to_string()));
        items.extend(client_library());
        image("initrd.img", "6.1", &items)
    })
}

/// The output of a program without forwarding.
fn natively(program: &Path) -> String {
    String::from_utf8(done(&mut native(Command::new(program))).stdout).unwrap()
}

fn same(program: &str, natively: &str, in_the_vm: &str) {
    // What a program beside the driver alone can use (accel/README.md).
    let withheld = ["cl_khr_command_buffer", "cl_pocl_content_size"];
    let refused = ["Fine-grained system sharing", "Run native kernels"];
    let rest = |line: &str| {
        let line = withheld.iter().fold(line.to_owned(), |line, word| line.replace(&format!(" {word}"), ""));
        if refused.iter().any(|of| line.contains(of)) { line.replace("Yes", "No") } else { line }
    };
    let mut expected: Vec<String> = natively
        .lines()
        .filter(|line| !withheld.iter().any(|word| line.trim_start().starts_with(word)))
        .map(rest)
        .collect();
    if let Some(at) = expected.iter().position(|line| line.contains("Command buffer capabilities")) {
        expected.drain(at..at + 4);
    }
    for (a, b) in expected.iter().zip(in_the_vm.lines()) {
        assert_eq!(a, b, "{program}: natively, and in the VM");
    }
    assert_eq!(expected.len(), in_the_vm.lines().count(), "{program}");
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

/// Starts a program in a that allocates 40 MB, keeps them, and says the API's code.
fn hold_buffer(lab: &Lab) -> (Child, String) {
    let mut command = lab.command(&["exec", "-i", "a", "--", "hold", "40"]);
    started(command.stdin(Stdio::piped()).stdout(Stdio::piped()))
}

/// A child, and the first line that it says.
fn started(command: &mut Command) -> (Child, String) {
    let mut child = command.spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    (child, line)
}

#[test]
fn a_vm_computes_on_the_hosts_devices_without_any_setting_also_after_its_server_was_killed() {
    let lab = Lab::new(&format!(
        r#"
[accel.cl]
memory = "64M"
window = "32M"
channels = 3
[vm.a]
kernel = "6.1"
initrd = "{}"
memory = "512M"
accelerators = ["cl"]
[vm.b]
kernel = "6.1"
memory = "256M"
accelerators = {{ cl = {{ weight = 25, channels = 1 }} }}
"#,
        guest_image().display()
    ));
    let up = native(lab.command(&["up"])).env("TMPDIR", lab.dir.path()).output().unwrap();
    let err = String::from_utf8_lossy(&up.stderr);
    assert!(up.status.success(), "{err}");
    let came = |vm: &str| err.lines().find(|l| l.starts_with(&format!("{vm}: up ("))).unwrap_or_default();
    assert!(
        came("b").ends_with(", no libtombolo-opencl.so in it for cl: see docs/accelerators.md)"),
        "{err}"
    );
    assert!(!came("a").contains("libtombolo"), "{err}");
    let cl = accelerator(&lab);
    let said = ["name", "api", "state", "starts"].map(|key| cl[key].clone());
    assert_eq!(said, ["cl".into(), "opencl".into(), "serving".into(), Value::from(1)]);
    let libraries: Vec<_> = cl["vms"].as_array().unwrap().iter().map(|v| v["library"].clone()).collect();
    assert_eq!(libraries, [true, false]);

    let (info, answers) = (natively(Path::new("clinfo")), natively(calls()));
    same("clinfo", &info, &lab.good(&["exec", "a", "--", "clinfo"]));
    same("calls", &answers, &lab.good(&["exec", "a", "--", "calls"]));

    // Programs of one VM have its memory together, until they end.
    let (mut first, code) = hold_buffer(&lab);
    assert_eq!(code, "0\n");
    let (mut second, code) = hold_buffer(&lab);
    assert_eq!(code, "-4\n", "CL_MEM_OBJECT_ALLOCATION_FAILURE");
    assert!(!second.wait().unwrap().success());
    wait_until("the first one's memory", || accelerator(&lab)["vms"][0]["memory"] == 40 << 20);
    drop(first.stdin.take());
    assert!(first.wait().unwrap().success());
    wait_until("the memory's return", || {
        let (mut next, code) = hold_buffer(&lab);
        drop(next.stdin.take());
        next.wait().unwrap();
        code == "0\n"
    });

    // `accel` shows the accelerator's users. A process of b may be one, though b lacks the library: its limits are its own.
    let hold = "exec 5<>/dev/tombolo-calls-cl; echo held; read -r end";
    let held: Vec<_> = ["a", "b"]
        .into_iter()
        .map(|vm| {
            let mut command = lab.command(&["exec", "-i", vm, "--", "sh", "-c", hold]);
            let (child, line) = started(command.stdin(Stdio::piped()).stdout(Stdio::piped()));
            assert_eq!(line, "held\n");
            child
        })
        .collect();
    wait_until("both clients", || {
        accelerator(&lab)["vms"].as_array().unwrap().iter().all(|vm| vm["clients"] == 1)
    });
    wait_until("its line", || {
        let table = lab.good(&["ps"]);
        table.lines().any(|l| l.starts_with("cl ") && l.contains("serving") && l.ends_with("there"))
    });
    let pid = accelerator(&lab)["pid"].clone();
    let servers: Value = serde_json::from_str(&lab.good(&["accel", "ls", "--json"])).unwrap();
    let server = servers.as_array().unwrap().iter().find(|s| s["pid"] == pid).expect("it is listed");
    let mut tenants: Vec<_> = server["tenants"]
        .as_array()
        .unwrap()
        .iter()
        .map(|t| {
            (t["via"].as_str().unwrap(), t["weight"].as_u64().unwrap(), t["memory_limit"].as_u64().unwrap())
        })
        .collect();
    tenants.sort_unstable();
    assert_eq!(tenants, [("vm:a", 100, 64 << 20), ("vm:b", 25, 64 << 20)]);

    // The server is killed: another one serves the next client.
    signal(u32::try_from(pid.as_u64().unwrap()).unwrap(), "KILL");
    same("clinfo", &info, &lab.good(&["exec", "a", "--", "clinfo"]));
    wait_until("the second server", || {
        let cl = accelerator(&lab);
        cl["starts"] == 2 && cl["state"] == "serving"
    });
    for mut child in held {
        drop(child.stdin.take());
        child.wait().unwrap();
    }
    let all = "exec 5<>/dev/tombolo-calls-cl 6<>/dev/tombolo-calls-cl 7<>/dev/tombolo-calls-cl";
    wait_until("all channels", || lab.run(&["exec", "a", "--", "sh", "-c", all]).status.success());

    // The guest reboots, and has its device again.
    lab.run(&["exec", "a", "--", "reboot"]);
    wait_until("the reboot", || {
        let vm = &lab.ps()["vms"][0];
        vm["reboots"] == 1 && vm["state"] == "up"
    });
    same("clinfo", &info, &lab.good(&["exec", "a", "--", "clinfo"]));

    lab.good(&["down"]);
    lab.assert_nothing_left();
    let left = std::fs::read_dir(lab.dir.path()).unwrap().map(|e| e.unwrap().file_name());
    let left: Vec<_> = left.filter(|name| name.to_string_lossy().starts_with("tombolo-accel")).collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn a_vm_finds_the_hosts_devices_by_the_commands_of_the_page() {
    let mut compose = String::new();
    for line in page::file("accelerators.md", "tombolo.toml").lines() {
        compose.extend([line, "\n"]);
        if line.starts_with("[vm.") {
            compose.push_str(&format!(
                "kernel = \"6.1\"\ninitrd = \"{}\"\nmemory = \"512M\"\n",
                guest_image().display()
            ));
        }
    }
    let lab = Lab::new(&compose);
    page::run(&lab, "accelerators.md", "vm", None);
    lab.assert_nothing_left();
}

const ONE: &str =
    "[accel.cl]\nwindow = \"1M\"\n[vm.a]\nkernel = \"6.1\"\nmemory = \"256M\"\naccelerators = [\"cl\"]\n";

#[test]
fn a_host_without_a_device_is_told_before_anything_boots() {
    let lab = Lab::new(ONE);
    let output = lab.command(&["up"]).env("OCL_ICD_VENDORS", lab.dir.path()).output().unwrap();
    let err = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && err.contains("accel.cl: no OpenCL device on this machine"), "{err}");
    assert!(err.contains("pocl-opencl-icd") && !err.contains("a: starting"), "{err}");
    lab.assert_nothing_left();
}

#[test]
fn a_guest_without_the_module_is_named_with_the_remedy() {
    let lab = Lab::new(&format!("{ONE}cmdline = \"module_blacklist=tombolo\"\n"));
    let output = native(lab.command(&["up"])).output().unwrap();
    assert_names_the_missing_module(&output);
    lab.assert_nothing_left();
}

#[test]
fn a_server_goes_on_under_the_supervisor_after_one_that_is_killed() {
    let lab = Lab::new(&format!("{ONE}ready = \"running\"\n"));
    done(&mut native(lab.command(&["up"])));
    let before = accelerator(&lab);
    assert_eq!(before["state"], "serving");
    lab.kill_with_shims(&[]);
    done(&mut native(lab.command(&["up"])));
    let after = accelerator(&lab);
    assert_eq!((&after["state"], &after["pid"]), (&before["state"], &before["pid"]));
    lab.good(&["down"]);
    lab.assert_nothing_left();
}
