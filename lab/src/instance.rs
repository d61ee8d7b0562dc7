// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A running lab: a folder with its sockets, logs and disks, and the emulator's process.
//!
//! The process that runs the lab holds an exclusive lock on the folder's `lock` file: the starter at first, the emulator as long as it lives
//! (it inherits the descriptor). So a folder whose lock is free has no owner, whatever killed that, and the next start removes it.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use rustix::fs::{FlockOperation, flock};
use rustix::process::{Pid, Signal, kill_process};

use crate::bochs::LOG as BOCHS_LOG;
use crate::cache::{self, Kernel};
use crate::client::{Output, Session};
use crate::config::{Config, Machine};
use crate::emulator::Emulator;
use crate::protocol::Start;
use crate::signals::{ChildOf, detach};

/// Longest time from QEMU's start to the agent's answer.
pub const BOOT_TIMEOUT: Duration = Duration::from_secs(180);
/// The same for Bochs, which is ten times slower.
pub const BOCHS_TIMEOUT: Duration = Duration::from_secs(600);
/// The agent's answer at the end of a boot, at least: what is left of the boot's time may be nothing.
const LEAST_TIMEOUT: Duration = Duration::from_secs(10);
/// The log of the lab's kernel, in the lab's folder.
pub const CONSOLE: &str = "console.log";

/// A lab that this process started, or one that was up already.
pub struct Lab {
    folder: PathBuf,
    child: Option<Child>,
    /// Ends with this value.
    owned: bool,
    /// The emulator; `None` for a lab that was found running.
    pub started: Option<Started>,
}

/// A started lab and what it runs on.
#[derive(Debug, Clone)]
pub struct Started {
    /// The lab's kernel.
    pub kernel: Kernel,
    pub emulator: Emulator,
    /// From the emulator's start to the agent's answer.
    pub boot: Duration,
}

/// Told of a lab's folder when it is there and of its process before it boots, so that a signal can clean up.
pub trait Watch {
    /// The lab's folder, and its process once there is one.
    fn begun(&self, folder: &Path, pid: Option<Pid>);
}

impl Watch for () {
    fn begun(&self, _: &Path, _: Option<Pid>) {}
}

/// The folder that holds the folders of this user's labs. It need not exist; one that another user could change is refused.
pub fn base() -> Result<PathBuf> {
    let base = std::env::var_os("XDG_RUNTIME_DIR").map_or_else(
        || std::env::temp_dir().join(format!("tombolo-lab-{}", rustix::process::getuid().as_raw())),
        |folder| PathBuf::from(folder).join("tombolo-lab"),
    );
    check_base(&base)?;
    Ok(base)
}

impl Lab {
    /// Boots a lab. With a name it stays up until [`down`]; without one it ends with the value returned.
    pub fn start(config: &Config, name: Option<&str>, watch: &dyn Watch) -> Result<Self> {
        config.check()?;
        if config.agent.is_empty() {
            bail!("no agent was named for the lab");
        }
        let emulator = Emulator::choose(config)?;
        let kernel = cache::kernel()?;
        let (folder, lock) = create_folder(&base()?, name)?;
        watch.begun(&folder, None);
        let mut lab = Self { folder, child: None, owned: true, started: None };
        lab.boot(config, emulator, kernel, lock, name.is_some(), watch)?;
        lab.owned = name.is_none();
        Ok(lab)
    }

    /// The lab of this name, if it is up.
    pub fn find(name: &str) -> Result<Option<Self>> {
        let folder = base()?.join(check_name(name)?);
        let up = folder.join("lock").exists() && free_lock(&folder)?.is_none();
        Ok(up.then_some(Self { folder, child: None, owned: false, started: None }))
    }

    /// The lab's folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The kind of this lab.
    pub fn machine(&self) -> Result<Machine> {
        let path = self.folder.join("config.json");
        let text = fs::read(&path)
            .with_context(|| format!("reading {}: is it only just starting?", path.display()))?;
        let config: Config =
            serde_json::from_slice(&text).with_context(|| format!("reading {}", path.display()))?;
        Ok(config.machine)
    }

    fn boot(
        &mut self,
        config: &Config,
        emulator: Emulator,
        kernel: Kernel,
        lock: File,
        stays: bool,
        watch: &dyn Watch,
    ) -> Result<()> {
        fs::create_dir(self.folder.join("out"))?;
        let mut command = emulator.prepare(&self.folder, config, &kernel)?;
        fs::write(self.folder.join("config.json"), serde_json::to_vec_pretty(config)?)?;
        let log = File::create(self.folder.join("emulator.log"))?;
        // Standard input carries the lock; nothing is read from it.
        command.stdin(lock).stdout(log.try_clone()?).stderr(Stdio::from(log));
        detach(&mut command, if stays { ChildOf::None } else { ChildOf::Us });
        let begin = Instant::now();
        let child = command.spawn().with_context(|| format!("starting {emulator}"))?;
        fs::write(self.folder.join("pid"), child.id().to_string())?;
        watch.begun(&self.folder, Some(Pid::from_child(&child)));
        let child = self.child.insert(child);
        let timeout = match config.machine {
            Machine::Svm => BOOT_TIMEOUT,
            Machine::Vmx => BOCHS_TIMEOUT,
        };
        let deadline = begin + timeout;
        let left = || deadline.saturating_duration_since(Instant::now()).max(LEAST_TIMEOUT);
        let mut alive = || match child.try_wait()? {
            Some(status) => bail!("{emulator} ended ({status})"),
            None => Ok(()),
        };
        emulator
            .await_agent(&self.folder, &mut alive, deadline)
            .and_then(|()| Session::open(&self.folder, left()))
            .map_err(|error| anyhow!("the lab did not come up: {error:#}\n{}", logs(&self.folder)))?;
        self.started = Some(Started { kernel, emulator, boot: begin.elapsed() });
        Ok(())
    }

    /// Runs a command with no input and collects its output; the environment is small and fixed.
    pub fn output(&self, argv: &[&str]) -> Result<Output> {
        let mut session = Session::open(&self.folder, BOOT_TIMEOUT)?;
        let mut output = Output { code: 0, stdout: Vec::new(), stderr: Vec::new() };
        let start = Start {
            argv: argv.iter().map(|a| (*a).to_owned()).collect(),
            env: vec![
                ("PATH".into(), "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin".into()),
                ("HOME".into(), "/root".into()),
            ],
            cwd: "/".into(),
            tty: None,
        };
        output.code = session.run(start, None, &mut output_sink(&mut output.stdout, &mut output.stderr))?;
        Ok(output)
    }
}

/// The last lines of what the emulator and the lab's kernel said.
fn logs(folder: &Path) -> String {
    let mut said = String::new();
    // A kernel's panic alone has some twenty lines.
    for (name, most) in [("emulator.log", 10), (BOCHS_LOG, 10), (CONSOLE, 30)] {
        let text = String::from_utf8_lossy(&fs::read(folder.join(name)).unwrap_or_default()).into_owned();
        let lines: Vec<&str> = text.lines().collect();
        if !lines.is_empty() {
            said.push_str(&format!("--- {name}\n{}\n", lines[lines.len().saturating_sub(most)..].join("\n")));
        }
    }
    said
}

struct Collect<'a>(&'a mut Vec<u8>, &'a mut Vec<u8>);

fn output_sink<'a>(stdout: &'a mut Vec<u8>, stderr: &'a mut Vec<u8>) -> Collect<'a> {
    Collect(stdout, stderr)
}

impl crate::client::Sink for Collect<'_> {
    fn stdout(&mut self, data: &[u8]) -> std::io::Result<()> {
        self.0.extend_from_slice(data);
        Ok(())
    }
    fn stderr(&mut self, data: &[u8]) -> std::io::Result<()> {
        self.1.extend_from_slice(data);
        Ok(())
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        if !self.owned {
            return;
        }
        if let Some(child) = &mut self.child {
            // Fails only where it has ended already.
            let _ = child.kill();
            let _ = child.wait();
        }
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// Ends the lab of this name and removes its folder. False if it was not up.
pub fn down(name: &str) -> Result<bool> {
    let folder = base()?.join(check_name(name)?);
    if !folder.exists() {
        return Ok(false);
    }
    if let Some(_lock) = free_lock(&folder)? {
        fs::remove_dir_all(&folder)?;
        return Ok(false);
    }
    let text =
        fs::read_to_string(folder.join("pid")).with_context(|| format!("{name} is only just starting"))?;
    let pid = text.trim().parse().ok().and_then(Pid::from_raw).context("the lab's pid file is damaged")?;
    // The lock says that the process which wrote this number, or none, has it.
    // Nothing in it is kept, and Bochs would not hear anything softer.
    kill_process(pid, Signal::KILL).context("ending the lab's emulator")?;
    let lock = File::open(folder.join("lock"))?;
    flock(&lock, FlockOperation::LockExclusive).context("waiting for the lab's end")?;
    fs::remove_dir_all(&folder).with_context(|| format!("removing {}", folder.display()))?;
    Ok(true)
}

/// Names of the labs that are up and stay up.
pub fn list() -> Result<Vec<String>> {
    let mut names = Vec::new();
    for folder in folders(&base()?)? {
        let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if !name.starts_with(EPHEMERAL) && free_lock(&folder)?.is_none() {
            names.push(name);
        }
    }
    names.sort();
    Ok(names)
}

const EPHEMERAL: &str = "run-";

fn check_name(name: &str) -> Result<&str> {
    let good = !name.is_empty()
        && name.len() <= 40
        && name.chars().all(|c| c.is_ascii_alphanumeric() || "-_".contains(c));
    if !good || name.starts_with(EPHEMERAL) {
        bail!("{name:?} is no name for a lab: use letters, digits, - and _, and not {EPHEMERAL}… (--name)");
    }
    Ok(name)
}

fn folders(base: &Path) -> Result<Vec<PathBuf>> {
    match fs::read_dir(base) {
        Ok(entries) => {
            Ok(entries.filter_map(|e| Some(e.ok()?.path())).filter(|p| p.join("lock").exists()).collect())
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error).with_context(|| format!("reading {}", base.display())),
    }
}

/// The lock of a folder without an owner; None: a process holds it.
fn free_lock(folder: &Path) -> Result<Option<File>> {
    let lock = match File::open(folder.join("lock")) {
        Ok(lock) => lock,
        Err(error) => return Err(error).with_context(|| format!("opening the lock in {}", folder.display())),
    };
    match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(Some(lock)),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
        Err(error) => Err(error).context("locking a lab's folder"),
    }
}

/// Makes the folder of a new lab with its lock held, and removes those that crashed labs left.
/// Refuses a folder of labs that another user could change: in a temporary folder another one may have made it first. It need not exist.
fn check_base(base: &Path) -> Result<()> {
    use std::os::unix::fs::MetadataExt;
    let Ok(meta) = fs::symlink_metadata(base) else { return Ok(()) };
    if meta.is_dir() && meta.uid() == rustix::process::geteuid().as_raw() && meta.mode() & 0o022 == 0 {
        return Ok(());
    }
    bail!("{} is not a folder that only you can write to; remove it, or set XDG_RUNTIME_DIR", base.display())
}

fn create_folder(base: &Path, name: Option<&str>) -> Result<(PathBuf, File)> {
    use std::os::unix::fs::DirBuilderExt;
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(base)
        .with_context(|| format!("creating {}", base.display()))?;
    check_base(base)?;
    let gate = File::create(base.join(".gate"))?;
    flock(&gate, FlockOperation::LockExclusive).context("waiting for another lab that starts")?;
    for folder in folders(base)? {
        if let Some(_lock) = free_lock(&folder)? {
            fs::remove_dir_all(&folder)
                .with_context(|| format!("removing what a crashed lab left: {}", folder.display()))?;
        }
    }
    let folder = match name {
        Some(name) => base.join(check_name(name)?),
        None => {
            static STARTED: AtomicU32 = AtomicU32::new(0);
            let number = STARTED.fetch_add(1, Ordering::Relaxed);
            base.join(format!("{EPHEMERAL}{}-{number}", std::process::id()))
        }
    };
    match fs::create_dir(&folder) {
        Ok(()) => {}
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
            bail!(
                "the lab {} is up already: use it, or end it with `tombolo lab down`",
                name.unwrap_or("of this process")
            );
        }
        Err(error) => return Err(error).with_context(|| format!("creating {}", folder.display())),
    }
    let lock = File::create(folder.join("lock"))?;
    flock(&lock, FlockOperation::NonBlockingLockExclusive).context("locking the new lab's folder")?;
    Ok((folder, lock))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_crashed_lab_left_is_removed_by_the_next_start() {
        let base = tempfile::tempdir().unwrap();
        let (crashed, lock) = create_folder(base.path(), Some("crashed")).unwrap();
        let (alive, _held) = create_folder(base.path(), Some("alive")).unwrap();
        assert!(crashed.exists());
        drop(lock);
        let (_new, _lock) = create_folder(base.path(), None).unwrap();
        assert!(!crashed.exists() && alive.exists());
    }

    #[test]
    fn a_lab_that_is_up_is_not_started_again() {
        let base = tempfile::tempdir().unwrap();
        let (_folder, _lock) = create_folder(base.path(), Some("one")).unwrap();
        let error = create_folder(base.path(), Some("one")).unwrap_err();
        assert!(error.to_string().contains("tombolo lab down"), "{error}");
    }

    #[test]
    fn a_folder_that_another_user_could_change_has_no_labs() {
        use std::os::unix::fs::PermissionsExt;
        let base = tempfile::tempdir().unwrap();
        fs::set_permissions(base.path(), fs::Permissions::from_mode(0o777)).unwrap();
        let error = create_folder(base.path(), None).unwrap_err();
        assert!(error.to_string().contains("only you can write to"), "{error}");
        assert_eq!(fs::read_dir(base.path()).unwrap().count(), 0);
    }

    #[test]
    fn names_cannot_leave_the_folder_of_labs() {
        for bad in ["", "..", "a/b", "run-1", "a b"] {
            assert!(check_name(bad).is_err(), "{bad}");
        }
        assert_eq!(check_name("lab-2").unwrap(), "lab-2");
    }
}
