// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Does KVM really run stock kernels here? Found out by running a tiny guest ([`tiny`]) with a time limit, since on
//! some hosts the device opens and no stock kernel boots. The answer is kept until the host boots again.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::{Hypervisor, Qemu, tiny};
use crate::child;

/// The answer, and why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Verdict {
    /// A guest ran under KVM.
    pub works: bool,
    /// One sentence.
    pub why: String,
}

impl Verdict {
    /// The hypervisor to use.
    pub fn hypervisor(&self) -> Hypervisor {
        if self.works { Hypervisor::Kvm } else { Hypervisor::Tcg }
    }
}

/// The time a guest gets to reach user space. Under nested virtualization in an emulated host it takes 8 s.
pub const LIMIT: Duration = Duration::from_secs(20);
/// The same where the user insists on KVM: a host that is busy with other things may be slow.
pub const INSISTING: Duration = Duration::from_secs(240);

/// Asks once per boot of the host, QEMU and kernel, or again with more than the usual [`LIMIT`] if the answer was no; `announce` is called
/// before a guest is run, which takes seconds.
pub fn verdict(qemu: &Qemu, kernel: Option<&Path>, limit: Duration, announce: impl FnOnce()) -> Verdict {
    if let Some(no) = refusal(Path::new("/dev/kvm")) {
        return no;
    }
    let Some(kernel) = kernel else {
        return Verdict {
            works: false,
            why: "there is no guest kernel to try KVM with; build the guest kit".into(),
        };
    };
    let cache = cache_file(qemu, kernel);
    let known: Option<Verdict> =
        cache.as_deref().and_then(|c| std::fs::read(c).ok()).and_then(|b| serde_json::from_slice(&b).ok());
    if let Some(known) = known.filter(|known| known.works || limit <= LIMIT) {
        return known;
    }
    announce();
    let verdict = try_guest(qemu, kernel, Hypervisor::Kvm, limit);
    if let (Some(cache), Ok(json)) = (&cache, serde_json::to_vec(&verdict)) {
        // A host where the answer can't be kept asks again.
        if let Err(e) = crate::project::state::write_atomically(cache, &json) {
            crate::say!("{} can't be written ({e}): KVM will be tried again next time", cache.display());
        }
    }
    verdict
}

/// Reasons that need no guest.
fn refusal(device: &Path) -> Option<Verdict> {
    let no = |why: String| Some(Verdict { works: false, why });
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

/// Runs the tiny guest with `kernel` under `hypervisor` for at most `limit`.
pub fn try_guest(qemu: &Qemu, kernel: &Path, hypervisor: Hypervisor, limit: Duration) -> Verdict {
    match run(qemu, kernel, hypervisor, limit) {
        Ok(verdict) => verdict,
        Err(e) => Verdict { works: false, why: format!("a tiny guest could not be tried: {e:#}") },
    }
}

fn run(qemu: &Qemu, kernel: &Path, hypervisor: Hypervisor, limit: Duration) -> anyhow::Result<Verdict> {
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
    let out = qemu.take_stdout()?;
    let err = qemu.take_stderr()?;
    let (lines, said) = mpsc::channel();
    let failures = lines.clone();
    let readers = [
        std::thread::spawn(move || forward(out, &lines)),
        std::thread::spawn(move || forward(err, &failures)),
    ];
    let mut last = String::new();
    let verdict = loop {
        let left = limit.saturating_sub(start.elapsed());
        match said.recv_timeout(left) {
            Ok(line) if line.contains(tiny::SAYS) => {
                break Verdict {
                    works: true,
                    why: format!(
                        "a tiny guest ran under {} ({:.1} s)",
                        hypervisor.name(),
                        start.elapsed().as_secs_f32()
                    ),
                };
            }
            Ok(line) if line.contains("KVM internal error") => {
                break no(hypervisor, &format!("its kernel met '{}'", line.trim()));
            }
            Ok(line) if !line.trim().is_empty() => last = line.trim().to_owned(),
            Ok(_) => {}
            Err(mpsc::RecvTimeoutError::Timeout) => {
                break no(hypervisor, &format!("it did not reach user space within {} s", limit.as_secs()));
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                break no(hypervisor, &format!("QEMU ended: {last}"));
            }
        }
    };
    qemu.kill();
    for reader in readers {
        if reader.join().is_err() {
            anyhow::bail!("a reader of QEMU's output failed");
        }
    }
    Ok(verdict)
}

fn no(hypervisor: Hypervisor, what: &str) -> Verdict {
    let pvm = Path::new("/sys/module/kvm_pvm").exists();
    let hint = if pvm { "; this host's KVM is PVM, which runs no stock kernels" } else { "" };
    Verdict {
        works: false,
        why: format!("a tiny guest did not run under {}: {what}{hint}", hypervisor.name()),
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
        let verdict = try_guest(&qemu, Path::new("/nonexistent"), Hypervisor::Kvm, Duration::from_secs(60));
        assert!(!verdict.works && verdict.why.contains("QEMU ended"), "{verdict:?}");
    }
}
