// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The lab with VMX under Bochs, as its user has it: commands, files, a nested guest, and what is left when it ends in each way.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tombolo_lab::{cache, initramfs};

const PROGRAM: &str = env!("CARGO_BIN_EXE_tombolo-lab");
/// Far beyond what anything here takes.
const TIMEOUT: Duration = Duration::from_secs(900);

/// Bochs takes a CPU: one at a time.
static ONE: Mutex<()> = Mutex::new(());

/// A place for labs of its own.
struct Place {
    folder: tempfile::TempDir,
    _alone: MutexGuard<'static, ()>,
}

impl Place {
    fn new() -> Self {
        let alone = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        Self { folder: tempfile::tempdir().unwrap(), _alone: alone }
    }

    fn lab(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(PROGRAM);
        command.arg("--vmx").args(arguments).env("XDG_RUNTIME_DIR", self.folder.path());
        command.stdin(Stdio::null());
        command
    }

    fn output(&self, arguments: &[&str]) -> Output {
        self.lab(arguments).output().unwrap()
    }

    /// Runs a line of shell in the lab that is up.
    fn good(&self, line: &str) -> String {
        let output = self.output(&["run", "--", "sh", "-c", line]);
        assert!(output.status.success(), "{line}: {}", said(&output));
        String::from_utf8(output.stdout).unwrap()
    }

    /// Folders of labs, whether alive or not.
    fn labs(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(self.folder.path().join("tombolo-lab")).into_iter().flatten();
        entries.map(|e| e.unwrap().path()).filter(|p| p.is_dir()).collect()
    }
}

fn said(output: &Output) -> String {
    format!(
        "{} {}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}

/// Calls `look` until it returns a value.
fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(begun.elapsed() < TIMEOUT, "{what}: not after {TIMEOUT:?}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Returns whether a process runs; a zombie does not.
fn runs(pid: i32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('Z'))
}

#[test]
fn a_nested_guest_boots_under_kvm_and_commands_have_their_code_input_output_and_files() {
    let place = Place::new();
    let kernel = cache::kernel().unwrap();
    let guest = place.folder.path().join("guest.cpio");
    initramfs::write_guest(&guest, &kernel, &[], "echo \"tombolo: init of $($B uname -r)\"").unwrap();
    let up = place.output(&["up", "--with", guest.to_str().unwrap()]);
    assert!(up.status.success() && said(&up).contains("EPTP switching"), "{}", said(&up));
    assert_eq!(String::from_utf8(place.output(&["list"]).stdout).unwrap(), "vmx\n");

    let mut child = place.lab(&["run", "--", "sh", "-c", "cat; echo to stderr >&2; exit 5"]);
    let mut child =
        child.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"typed\n").unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(
        (output.status.code(), &output.stdout[..], &output.stderr[..]),
        (Some(5), &b"typed\n"[..], &b"to stderr\n"[..])
    );

    let million = vec![b'x'; 1_000_000];
    let mut child =
        place.lab(&["run", "--", "wc", "-c"]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(&million).unwrap();
    assert_eq!(child.wait_with_output().unwrap().stdout, b"1000000\n");

    let out = place.folder.path().join("out");
    let script = "mkdir $TOMBOLO_LAB_OUT/d && seq 1 30000 >$TOMBOLO_LAB_OUT/d/numbers";
    let output = place.output(&["run", "--out", out.to_str().unwrap(), "--", "sh", "-c", script]);
    assert!(output.status.success(), "{}", said(&output));
    let numbers = fs::read_to_string(out.join("d/numbers")).unwrap();
    assert!(numbers.lines().eq((1..=30000).map(|n| n.to_string())));

    // IA32_VMX_VMFUNC as a program in the lab reads it.
    let msr =
        place.good("dd if=/dev/cpu/0/msr bs=8 count=1 skip=1169 iflag=skip_bytes 2>/dev/null | od -An -tu1");
    let low: u8 = msr.split_whitespace().next().unwrap().parse().unwrap();
    assert_eq!(low & 1, 1, "no EPTP switching in {msr}");

    let console = place.good(&format!(
        "qemu-system-x86_64 -accel kvm -cpu host -m 256 -nodefaults -no-reboot -display none -serial stdio \
         -kernel {} -initrd {} -append 'console=ttyS0 panic=-1 no_timer_check tsc=reliable mitigations=off' </dev/null",
        kernel.image.display(),
        guest.display()
    ));
    assert!(console.contains("Linux version"), "{console}");
    assert!(console.contains("Hypervisor detected: KVM"), "{console}");
    assert!(console.contains(&format!("tombolo: init of {}", kernel.release)), "{console}");

    let lab = place.labs().pop().unwrap();
    let bochs: i32 = fs::read_to_string(lab.join("pid")).unwrap().trim().parse().unwrap();
    let down = place.output(&["down"]);
    assert!(down.status.success(), "{}", said(&down));
    assert!(!runs(bochs) && place.labs().is_empty());
}

/// Starts a lab for one command and waits until Bochs runs; gives Bochs' process, too.
fn starting(place: &Place) -> (Child, i32) {
    let mut child = place.lab(&["run", "--", "true"]).stderr(Stdio::null()).spawn().unwrap();
    let bochs = until("Bochs' process", || {
        assert!(child.try_wait().unwrap().is_none(), "the lab ended by itself");
        place.labs().iter().find_map(|lab| fs::read_to_string(lab.join("pid")).ok()?.trim().parse().ok())
    });
    (child, bochs)
}

#[test]
fn ctrl_c_while_it_boots_leaves_no_process_and_no_file() {
    let place = Place::new();
    let (mut child, bochs) = starting(&place);
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    until("Bochs' end", || (!runs(bochs)).then_some(()));
    assert_eq!(place.labs(), Vec::<PathBuf>::new());
}

#[test]
fn bochs_ends_with_a_lab_command_that_is_killed_and_the_next_start_clears_up() {
    let place = Place::new();
    let (mut child, bochs) = starting(&place);
    child.kill().unwrap();
    child.wait().unwrap();
    until("Bochs' end", || (!runs(bochs)).then_some(()));
    let left = place.labs();
    assert_eq!(left.len(), 1);
    let refused = place.output(&["run", "--with", "/nowhere", "--", "true"]);
    assert!(!refused.status.success() && said(&refused).contains("/nowhere"), "{}", said(&refused));
    assert_eq!(place.labs(), Vec::<PathBuf>::new());
}

#[test]
fn a_boot_that_fails_ends_with_the_kernels_last_words() {
    let place = Place::new();
    let failed = place.output(&["run", "--append", "rdinit=/nowhere init=/nowhere", "--", "true"]);
    assert!(!failed.status.success(), "{}", said(&failed));
    assert!(said(&failed).contains("Kernel panic"), "{}", said(&failed));
    assert_eq!(place.labs(), Vec::<PathBuf>::new());
}

#[test]
fn what_bochs_has_not_is_refused_with_its_name() {
    let place = Place::new();
    for option in ["--cpus=2", "--iommu=amd", "--fresh=.", "--qemu=qemu"] {
        let refused = place.output(&["run", option, "--", "true"]);
        let name = option.split('=').next().unwrap();
        assert!(!refused.status.success() && said(&refused).contains(name), "{}", said(&refused));
    }
    assert!(!Path::new(place.folder.path()).join("tombolo-lab").exists());
}
