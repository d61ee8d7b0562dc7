// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Guests under QEMU with the zone. The first one boots, and its state is saved before it uses the zone; all others start from that state.
//! Doorbell and module are added after that, since they belong to one life only.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tombolo_zone::doorbell::VECTORS;
use tombolo_zone::{Liveness, MemberId, Rights, Role};

use crate::remote::{Remote, TIMEOUT, accept, listen};
use crate::site::{Site, announce, tie};

/// Kernel messages that fail a run.
const BAD: &str =
    "BUG|Oops|WARNING:|general protection|Call Trace|hung task|refcount_t|INFO: task|soft lockup|is damaged";

fn text(e: impl std::fmt::Display) -> String {
    e.to_string()
}

/// A guest with the zone, nothing mounted yet.
pub struct Guest {
    name: String,
    /// Its shell: a line in, output and `<<rc=N>>` out.
    shell: BufReader<UnixStream>,
    monitor: BufReader<UnixStream>,
    line: Option<UnixStream>,
    console: PathBuf,
    process: OwnedFd,
    /// Receives the time at which its death was declared.
    gone: mpsc::Receiver<Instant>,
}

impl Guest {
    /// Boots a guest, or starts it from the first one's state after its boot.
    pub fn new(site: &Site, name: &str) -> Result<Guest, String> {
        let saved = site.boot.work.join("saved");
        let capability = json!({"capabilities": [{"capability": "x-ignore-shared", "state": true}]});
        let uri = |command: &str| json!({"uri": format!("exec:{command} {}", saved.display())});
        if saved.exists() {
            let mut guest = Guest::start_qemu(site, name, &["-incoming", "defer"])?;
            guest.monitor("migrate-set-capabilities", capability)?;
            guest.monitor("migrate-incoming", uri("cat"))?;
            guest.wait_for("query-status", "running")?;
            return guest.with_doorbell();
        }
        let mut guest = Guest::start_qemu(site, name, &[])?;
        guest.until("<<ready>>")?;
        guest.monitor("migrate-set-capabilities", capability)?;
        guest.monitor("migrate", uri("cat >"))?;
        guest.wait_for("query-migrate", "completed")?;
        guest.monitor("cont", json!({}))?;
        guest.with_doorbell()
    }

    fn with_doorbell(mut self) -> Result<Guest, String> {
        let device =
            json!({"driver": "ivshmem-doorbell", "chardev": "bell", "vectors": VECTORS, "bus": "later"});
        self.monitor("device_add", device)?;
        self.run("for i in $(seq 500); do grep -q 0x1110 /sys/bus/pci/devices/*/device && exit; usleep 20000; done; exit 1")?;
        Ok(self)
    }

    fn start_qemu(site: &Site, name: &str, more: &[&str]) -> Result<Guest, String> {
        let id = site.zone.invite(name, Role::Vm, Rights::READ_WRITE).map_err(text)?;
        let alive = site.zone.hold(id).map_err(text)?;
        let at = |what: &str| {
            let path = site.boot.work.join(format!("{name}.{what}"));
            // The socket of an earlier life, if any.
            let _ = std::fs::remove_file(&path);
            path
        };
        let (bell, monitor, line) = (at("bell"), at("monitor"), at("line"));
        let console = at("console");
        site.bells.listen(id, &bell).map_err(text)?;
        let listeners = [listen(&monitor)?, listen(&line)?];
        let (shell, guest_end) = UnixStream::pair().map_err(text)?;
        let mut command = Command::new(&site.boot.rig);
        command
            .arg("boot")
            .arg("--kernel")
            .arg(&site.boot.kernel)
            .arg("--image")
            .arg(&site.boot.initrd)
            .arg("--console")
            .arg(&console)
            .args(["--zone", &site.zone_path(), "--zone-size", &site.zone.size().to_string(), "--"])
            .args(["-chardev", &socket("monitor", &monitor), "-mon", "chardev=monitor,mode=control"])
            .args(["-device", "virtio-serial-pci", "-chardev", &socket("line", &line)])
            .args(["-device", "virtserialport,chardev=line,name=line"])
            .args(["-chardev", &socket("bell", &bell)])
            .args(["-device", "pcie-root-port,id=later,chassis=1,slot=1"])
            .args(more)
            .stdin(OwnedFd::from(guest_end.try_clone().map_err(text)?))
            .stdout(OwnedFd::from(guest_end));
        let (process, gone) = watch(command, name, site, id, alive)?;
        let [monitor, line] = listeners.map(|l| accept(&l, name));
        let mut guest = Guest {
            name: name.to_owned(),
            shell: BufReader::new(shell),
            monitor: BufReader::new(monitor?),
            line: Some(line?),
            console,
            process,
            gone,
        };
        for stream in [&guest.shell, &guest.monitor] {
            stream.get_ref().set_read_timeout(Some(TIMEOUT)).map_err(text)?;
        }
        guest.monitor("qmp_capabilities", json!({}))?;
        Ok(guest)
    }

    fn until(&mut self, mark: &str) -> Result<String, String> {
        let mut said = Vec::new();
        let mut byte = [0];
        while !said.ends_with(mark.as_bytes()) {
            match self.shell.read(&mut byte) {
                Ok(1) => said.push(byte[0]),
                other => {
                    return Err(format!(
                        "{}: the shell ends with {other:?}; console:\n{}",
                        self.name,
                        self.log()
                    ));
                }
            }
        }
        said.truncate(said.len() - mark.len());
        Ok(String::from_utf8_lossy(&said).into_owned())
    }

    pub fn start(&mut self, command: &str) -> Result<(), String> {
        let line = format!("{command}\n");
        self.shell.get_mut().write_all(line.as_bytes()).map_err(|e| format!("{}: {e}", self.name))
    }

    /// Runs a command in the guest, which must succeed.
    pub fn run(&mut self, command: &str) -> Result<String, String> {
        self.start(command)?;
        let output = self.until("<<rc=")?;
        match self.until(">>")?.as_str() {
            "0" => Ok(output),
            code => Err(format!("{}: `{command}` ends with {code}: {output}", self.name)),
        }
    }

    /// Mounts the zone and starts a worker there.
    pub fn mount(&mut self) -> Result<Remote, String> {
        self.run("insmod /modules/tombolo.ko && mount -t tombolo torture /mnt")?;
        // The kernel numbers devices with ports as it finds them, so the port is known by its name alone.
        const WORK: &str = "port=$(grep -lx line /sys/class/virtio-ports/*/name) && port=${port%/name} && \
            { tombolo-files-torture worker /mnt /dev/${port##*/} </dev/null >/tmp/worker 2>&1 & }";
        self.run(WORK)?;
        let line = self.line.take().ok_or("a guest has one worker")?;
        Remote::new(&self.name, line).map_err(|e| format!("{e}; console:\n{}", self.log()))
    }

    /// Unmounts, after the worker has ended.
    pub fn unmount(&mut self) -> Result<(), String> {
        self.run("killall tombolo-files-torture; umount /mnt").map(|_| ())
    }

    /// Sends a command to its QEMU.
    pub fn monitor(&mut self, command: &str, arguments: Value) -> Result<Value, String> {
        let order = format!("{}\n", json!({"execute": command, "arguments": arguments}));
        self.monitor.get_mut().write_all(order.as_bytes()).map_err(text)?;
        loop {
            let mut line = String::new();
            self.monitor.read_line(&mut line).map_err(text)?;
            let mut answer: Value = serde_json::from_str(&line)
                .map_err(|e| format!("{}: {command}: {line:?}: {e}", self.name))?;
            if answer.get("error").is_some() {
                return Err(format!("{}: {command}: {line}", self.name));
            }
            if let Some(value) = answer.get_mut("return") {
                return Ok(value.take());
            }
        }
    }

    fn wait_for(&mut self, query: &str, state: &str) -> Result<(), String> {
        let since = Instant::now();
        loop {
            let answer = self.monitor(query, json!({}))?;
            if answer["status"] == state {
                return Ok(());
            }
            if answer["status"] == "failed" || since.elapsed() > TIMEOUT {
                return Err(format!("{}: {query} says {answer}", self.name));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Returns its kernel's messages.
    pub fn log(&self) -> String {
        let log = std::fs::read(&self.console).unwrap_or_default();
        String::from_utf8_lossy(&log[log.len().saturating_sub(6000)..]).into_owned()
    }

    /// Fails if its kernel printed a bad message.
    pub fn complaints(&mut self) -> Result<(), String> {
        let found = self.run(&format!("dmesg | grep -E '{BAD}' | head -5; true"))?;
        if found.trim().is_empty() { Ok(()) } else { Err(format!("{}: the kernel says: {found}", self.name)) }
    }

    /// Ends its QEMU at once.
    pub fn kill(&self) {
        // ESRCH: it has ended already.
        let _ = rustix::process::pidfd_send_signal(&self.process, rustix::process::Signal::KILL);
    }

    /// Waits until its death has been declared.
    pub fn wait_gone(&self) -> Result<Instant, String> {
        self.gone.recv_timeout(TIMEOUT).map_err(|e| format!("{}: does not end: {e}", self.name))
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.kill();
        // The error of a thread that has already sent its time doesn't matter.
        let _ = self.gone.recv_timeout(TIMEOUT);
    }
}

fn socket(id: &str, path: &Path) -> String {
    format!("socket,id={id},path={}", path.display())
}

/// Starts a QEMU in a thread that waits for its end and declares its member dead then.
fn watch(
    mut command: Command,
    name: &str,
    site: &Site,
    id: MemberId,
    alive: Liveness,
) -> Result<(OwnedFd, mpsc::Receiver<Instant>), String> {
    let (zone, bells, own) = (Arc::clone(&site.zone), Arc::clone(&site.bells), name.to_owned());
    let (started, start) = mpsc::channel();
    let (ended, end) = mpsc::channel();
    std::thread::spawn(move || {
        let mut child = match tie(&mut command).spawn() {
            Ok(child) => child,
            Err(e) => return drop(started.send(Err(format!("{own}: {e}")))),
        };
        let pid = rustix::process::Pid::from_child(&child);
        let handle = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty());
        if started.send(handle.map_err(text)).is_err() {
            // The owner of the guest has ended, so the guest must end.
            let _ = child.kill();
        }
        if let Err(e) = child.wait() {
            eprintln!("{own}: {e}");
        }
        let declared =
            bells.unlisten(id).and_then(|()| zone.declare_dead(id)).and_then(|_| announce(&zone, &bells));
        drop(alive);
        if let Err(e) = declared {
            eprintln!("{own}: {e}");
        }
        // The receiver may have ended.
        let _ = ended.send(Instant::now());
    });
    let process = start.recv().map_err(text)??;
    Ok((process, end))
}
