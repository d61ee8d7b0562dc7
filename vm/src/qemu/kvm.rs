// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Does KVM really run stock kernels here? Found out by running a tiny guest ([`tiny`]) with a time limit, since on
//! some hosts the device opens and no stock kernel boots. The answer is kept as long as it [holds](Holds).

use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::{Hypervisor, Qemu, tiny};
use crate::child;
use crate::thread;

/// The answer, and why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Verdict {
    /// A guest ran under KVM.
    pub works: bool,
    /// One sentence.
    pub why: String,
    /// How long it is the answer.
    #[serde(default)]
    pub holds: Holds,
}

/// How long a [`Verdict`] is the answer for later starts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Holds {
    /// A guest has shown it: until the host boots again.
    Boot,
    /// A guest was too slow, which a busy host explains as well, or QEMU found its own state wrong and aborted: for [`BRIEF`].
    #[default]
    Brief,
    /// There was no guest, for a reason that may pass, such as another hypervisor that uses the CPU or want of memory: for no other start.
    Once,
}

impl Verdict {
    /// The hypervisor to use.
    pub fn hypervisor(&self) -> Hypervisor {
        if self.works { Hypervisor::Kvm } else { Hypervisor::Tcg }
    }
}

/// The time a guest gets to reach user space. Under nested virtualization in an emulated host it takes 8 s.
pub const LIMIT: Duration = Duration::from_secs(20);
/// The time between two checks whether the user still waits for the answer.
const LOOK: Duration = Duration::from_millis(100);
/// The time of [`LIMIT`] where the user insists on KVM: a host that is busy with other things may be slow.
pub const INSISTING: Duration = Duration::from_secs(240);

/// The time for which a start uses the answer of an earlier one that [holds](Holds) briefly.
const BRIEF: Duration = Duration::from_secs(600);
/// Time for a QEMU that has closed its outputs to end.
const END: Duration = Duration::from_secs(5);

/// Asks anew where no earlier answer for this QEMU and kernel holds, or with more than the usual [`LIMIT`] if that was no; `announce` is called
/// before a guest is run, which takes seconds. `None`: `is_cancelled` ended the guest's run.
pub fn verdict(
    qemu: &Qemu,
    kernel: Option<&Path>,
    limit: Duration,
    announce: impl FnOnce(),
    is_cancelled: &dyn Fn() -> bool,
) -> Option<Verdict> {
    if let Some(no) = refusal(Path::new("/dev/kvm")) {
        return Some(no);
    }
    let Some(kernel) = kernel else {
        let why = "there is no guest kernel to try KVM with; build the guest kit".into();
        return Some(Verdict { works: false, why, holds: Holds::Once });
    };
    let cache = cache_file(qemu, kernel);
    if let Some(known) = cache.as_deref().and_then(known).filter(|known| known.works || limit <= LIMIT) {
        return Some(known);
    }
    announce();
    let verdict = try_guest(qemu, kernel, Hypervisor::Kvm, limit, is_cancelled)?;
    if let (Some(cache), Ok(json), true) =
        (&cache, serde_json::to_vec(&verdict), verdict.holds != Holds::Once)
    {
        // A host where the answer can't be kept asks again.
        if let Err(e) = crate::project::state::write_atomically(cache, &json) {
            crate::say!("{} can't be written ({e}): KVM will be tried again next time", cache.display());
        }
    }
    Some(verdict)
}

/// The answer of an earlier start, if it holds.
fn known(cache: &Path) -> Option<Verdict> {
    let verdict: Verdict = serde_json::from_slice(&std::fs::read(cache).ok()?).ok()?;
    // Its file's time lies in the future where the clock was set back.
    let age = || cache.metadata().and_then(|meta| meta.modified()).ok()?.elapsed().ok();
    let holds = match verdict.holds {
        Holds::Boot => true,
        Holds::Brief => age().is_some_and(|age| age < BRIEF),
        Holds::Once => false,
    };
    (holds || verdict.works).then_some(verdict)
}

/// Reasons that need no guest.
fn refusal(device: &Path) -> Option<Verdict> {
    let no = |why: String| Some(Verdict { works: false, why, holds: Holds::Once });
    match std::fs::OpenOptions::new().read(true).write(true).open(device) {
        Ok(_) => None,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => no(format!(
            "{} does not exist: the CPU or hypervisor offers no virtualization, or the module kvm_intel or kvm_amd is not loaded",
            device.display()
        )),
        Err(e) if e.kind() == std::io::ErrorKind::PermissionDenied => {
            no(format!("{} may not be opened; add yourself to the group kvm", device.display()))
        }
        Err(e) => no(format!("{} can't be opened: {e}", device.display())),
    }
}

fn cache_file(qemu: &Qemu, kernel: &Path) -> Option<PathBuf> {
    use std::os::unix::fs::MetadataExt;
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let kernel = kernel.canonicalize().ok()?;
    let meta = kernel.metadata().ok()?;
    let key = format!("{} {} {:?} {}", boot.trim(), qemu.program.display(), qemu.version, meta.mtime());
    let hash = crate::project::state::hash(format!("{key} {}", kernel.display()).as_bytes());
    Some(crate::project::state::base_dir().ok()?.join(format!("kvm-{hash:016x}.json")))
}

/// Runs the tiny guest with `kernel` under `hypervisor` for at most `limit`. `None`: `is_cancelled` ended its run.
pub fn try_guest(
    qemu: &Qemu,
    kernel: &Path,
    hypervisor: Hypervisor,
    limit: Duration,
    is_cancelled: &dyn Fn() -> bool,
) -> Option<Verdict> {
    let failed = |e| {
        let why = format!("a tiny guest could not be tried: {e:#}");
        Some(Verdict { works: false, why, holds: Holds::Once })
    };
    run(qemu, kernel, hypervisor, limit, is_cancelled).unwrap_or_else(failed)
}

fn run(
    qemu: &Qemu,
    kernel: &Path,
    hypervisor: Hypervisor,
    limit: Duration,
    is_cancelled: &dyn Fn() -> bool,
) -> anyhow::Result<Option<Verdict>> {
    let initramfs = child::memory_file("tombolo-probe", &tiny::initramfs())?;
    let mut command = std::process::Command::new(&qemu.program);
    command
        .args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-M", "q35", "-m", "128M"])
        .args(["-serial", "stdio", "-append", "console=ttyS0 quiet panic=-1"])
        .arg("-kernel")
        .arg(kernel)
        .arg("-initrd")
        .arg(child::inherited_path(&initramfs))
        .args(hypervisor.arguments(qemu))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    child::tie(&mut command, std::slice::from_ref(&initramfs));
    let start = Instant::now();
    let mut qemu = child::Guarded::spawn(command)?;
    let (Some(out), Some(err)) = qemu.take_output() else { anyhow::bail!("its output is not piped") };
    let (lines, said) = mpsc::channel();
    let failures = lines.clone();
    // They end with QEMU's outputs, which another process may have: a script that starts QEMU.
    thread::start("probe", move || forward(out, &lines))?;
    thread::start("probe", move || forward(err, &failures))?;
    let mut last = String::new();
    let verdict = loop {
        let left = limit.saturating_sub(start.elapsed());
        match said.recv_timeout(left.min(LOOK)) {
            Ok(line) if line.contains(tiny::SAYS) => {
                let seconds = start.elapsed().as_secs_f32();
                let why = format!("a tiny guest ran under {} ({seconds:.1} s)", hypervisor.name());
                break Some(Verdict { works: true, why, holds: Holds::Boot });
            }
            Ok(line) if line.contains("KVM internal error") => {
                break Some(no(hypervisor, &format!("its kernel met '{}'", line.trim()), Holds::Boot));
            }
            Ok(line) if !line.trim().is_empty() => last = line.trim().to_owned(),
            Ok(_) => {}
            Err(mpsc::RecvTimeoutError::Timeout) if is_cancelled() => break None,
            Err(mpsc::RecvTimeoutError::Timeout) if left > LOOK => {}
            Err(mpsc::RecvTimeoutError::Timeout) => {
                let why = format!("it did not reach user space within {} s", limit.as_secs());
                break Some(no(hypervisor, &why, Holds::Brief));
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                // A guest that resets itself ends it with success.
                let holds = qemu.wait_within(END)?.map_or(Holds::Once, holds_after);
                break Some(no(hypervisor, &format!("QEMU ended: {last}"), holds));
            }
        }
    };
    drop(qemu);
    Ok(verdict)
}

/// How long a no holds where QEMU ended by itself.
fn holds_after(end: ExitStatus) -> Holds {
    match end.signal() {
        None if end.success() => Holds::Boot,
        Some(libc::SIGABRT) => Holds::Brief,
        _ => Holds::Once,
    }
}

fn no(hypervisor: Hypervisor, what: &str, holds: Holds) -> Verdict {
    let pvm = Path::new("/sys/module/kvm_pvm").exists();
    let hint = if pvm { "; this host's KVM is PVM, which runs no stock kernels" } else { "" };
    Verdict {
        works: false,
        why: format!("a tiny guest did not run under {}: {what}{hint}", hypervisor.name()),
        holds,
    }
}

fn forward(stream: impl Read, lines: &mpsc::Sender<String>) {
    // A guest in trouble may say a lot; what counts is said in the first megabyte.
    let mut reader = BufReader::new(stream.take(1 << 20));
    let mut line = Vec::new();
    while reader.read_until(b'\n', &mut line).is_ok_and(|n| n > 0) {
        if lines.send(String::from_utf8_lossy(&line).into_owned()).is_err() {
            return;
        }
        line.clear();
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_missing_device_is_a_reason_and_needs_no_guest() {
        let no = refusal(Path::new("/nonexistent/kvm")).unwrap();
        assert!(!no.works && no.why.contains("does not exist"));
        assert_eq!(no.hypervisor(), Hypervisor::Tcg);
    }

    #[test]
    fn a_program_that_is_no_hypervisor_is_no_reason_to_use_kvm() {
        let qemu = Qemu { program: "/bin/false".into(), version: (7, 2, 0) };
        let kernel = Path::new("/nonexistent");
        let verdict = try_guest(&qemu, kernel, Hypervisor::Kvm, Duration::from_secs(60), &|| false).unwrap();
        assert!(!verdict.works && verdict.why.contains("QEMU ended"), "{verdict:?}");
    }

    #[test]
    fn a_try_that_had_no_guest_decides_for_no_later_start_and_a_slow_one_for_few() {
        let folder = tempfile::tempdir().unwrap();
        let tried = |script: &str, limit: u64| {
            let program = folder.path().join("qemu");
            std::fs::write(&program, format!("#!/bin/sh\n{script}\n")).unwrap();
            std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o700)).unwrap();
            let qemu = Qemu { program, version: (7, 2, 0) };
            let (kernel, limit) = (Path::new("/nonexistent"), Duration::from_millis(limit));
            try_guest(&qemu, kernel, Hypervisor::Kvm, limit, &|| false).unwrap()
        };
        let words = "Could not access KVM kernel module: Device or resource busy";
        let busy = tried(&format!("echo '{words}' >&2; exit 1"), 60_000);
        assert!(!busy.works && busy.why.contains(words) && busy.holds == Holds::Once, "{busy:?}");
        assert_eq!(tried("kill -KILL $$", 60_000).holds, Holds::Once);
        let aborted = tried("echo \"Assertion \\`ret == n' failed.\" >&2; kill -ABRT $$", 60_000);
        assert_eq!((aborted.works, aborted.holds), (false, Holds::Brief));
        let slow = tried("exec sleep 3600", 1);
        assert_eq!(slow.holds, Holds::Brief, "{slow:?}");
        assert_eq!(
            tried("echo 'KVM internal error. Suberror: 1'; exec sleep 3600", 60_000).holds,
            Holds::Boot
        );
        let reset = tried("echo 'Kernel panic'", 60_000);
        assert_eq!((reset.works, reset.holds), (false, Holds::Boot));
        let runs = tried(&format!("echo '{}'", tiny::SAYS), 60_000);
        assert_eq!((runs.works, runs.holds), (true, Holds::Boot));

        let cache = folder.path().join("kvm.json");
        let keep = |verdict: &Verdict, age: Duration| {
            std::fs::write(&cache, serde_json::to_vec(verdict).unwrap()).unwrap();
            let file = std::fs::File::options().write(true).open(&cache).unwrap();
            file.set_modified(std::time::SystemTime::now() - age).unwrap();
            known(&cache)
        };
        assert_eq!(keep(&slow, Duration::ZERO), Some(slow.clone()));
        assert_eq!(keep(&slow, BRIEF), None);
        assert_eq!(keep(&busy, Duration::ZERO), None);
        assert_eq!(keep(&reset, BRIEF), Some(reset));
        // As a version before has written it.
        std::fs::write(&cache, r#"{"works":false,"why":"QEMU ended"}"#).unwrap();
        assert_eq!(known(&cache).unwrap().holds, Holds::Brief);
        std::fs::write(&cache, r#"{"works":true,"why":"a tiny guest ran"}"#).unwrap();
        assert!(known(&cache).unwrap().works);
    }

    #[test]
    fn a_run_that_is_cancelled_ends_its_qemu_and_has_no_verdict() {
        let folder = tempfile::tempdir().unwrap();
        let [program, pid] = ["qemu", "pid"].map(|name| folder.path().join(name));
        let script = format!("#!/bin/sh\necho $$ >{0}.new\nmv {0}.new {0}\nexec sleep 3600\n", pid.display());
        std::fs::write(&program, script).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o700)).unwrap();
        let qemu = Qemu { program, version: (7, 2, 0) };
        let kernel = Path::new("/nonexistent");
        let limit = Duration::from_secs(3600);
        assert_eq!(try_guest(&qemu, kernel, Hypervisor::Kvm, limit, &|| pid.exists()), None);
        let process = std::fs::read_to_string(pid).unwrap();
        assert!(!Path::new("/proc").join(process.trim()).exists(), "it lives");
    }
}
