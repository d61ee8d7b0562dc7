// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The peers' servers on the host, which export one and the same folder in the host's memory. A server that is not installed, or that
//! ends or stays silent when it is started, leaves its peer out with a reason; the others go on.

use std::env;
use std::fs;
use std::io::ErrorKind;
use std::net::TcpStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

/// The NFS server's port on the host's loopback address.
pub const NFS_PORT: u16 = 20499;

/// QEMU 7.2's own virtiofsd; later ones, in Rust, have other options, and may have a link here.
const C_VIRTIOFSD: &str = "/usr/lib/qemu/virtiofsd";

/// A server's program, its version for the results file, and its processes, which end when this is dropped.
pub struct Server {
    version: String,
    children: Vec<Child>,
    /// vhost-user sockets by the name of the VM; none for NFS.
    sockets: Vec<(String, PathBuf)>,
}

/// The servers of the peers that need one, or why a peer has none.
pub struct Servers {
    /// virtiofsd, one process a VM.
    pub virtiofs: Result<Server, String>,
    /// nfs-ganesha.
    pub nfs: Result<Server, String>,
}

/// A program at one of these places, or found by its name as a shell finds it.
fn find(places: &[&str], name: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let by_name = env::split_paths(&path).map(|folder| folder.join(name));
    places.iter().map(PathBuf::from).chain(by_name).find(|p| p.is_file())
}

/// The first line that a program prints about its version.
fn version(program: &Path, arg: &str) -> String {
    Command::new(program)
        .arg(arg)
        .output()
        .ok()
        .and_then(|o| String::from_utf8_lossy(&o.stdout).lines().next().map(str::to_owned))
        .unwrap_or_else(|| program.display().to_string())
}

/// The last lines of a server's log, for its peer's reason.
fn end_of(log: &Path) -> String {
    let text = fs::read(log).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
    let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    match lines.len() {
        0 => "it printed nothing".into(),
        n => format!("it printed: {}", lines[n.saturating_sub(3)..].join(" | ")),
    }
}

impl Server {
    fn new(version: String) -> Server {
        Server { version, children: Vec::new(), sockets: Vec::new() }
    }

    /// Starts a process whose output goes to `log`, and waits until `ready`, the process' end, or 30 s.
    fn spawn(
        &mut self,
        command: &mut Command,
        log: &Path,
        mut ready: impl FnMut() -> Result<bool>,
    ) -> Result<()> {
        let name = command.get_program().to_string_lossy().into_owned();
        let out = fs::File::create(log).with_context(|| format!("can't write {}", log.display()))?;
        command.stdin(Stdio::null()).stdout(out.try_clone()?).stderr(out);
        // SAFETY: prctl(2) is async-signal-safe and touches no memory of the parent.
        unsafe {
            command.pre_exec(|| {
                rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::TERM))
                    .map_err(Into::into)
            });
        }
        let mut child = command.spawn().with_context(|| format!("can't start {name}"))?;
        let until = Instant::now() + Duration::from_secs(30);
        let outcome = loop {
            if let Some(status) = child.try_wait()? {
                break Err(format!("{name} ended at once ({status}); {}", end_of(log)));
            }
            if ready()? {
                break Ok(());
            }
            if Instant::now() > until {
                break Err(format!("{name} was not ready within 30 s; {}", end_of(log)));
            }
            thread::sleep(Duration::from_millis(20));
        };
        self.children.push(child);
        outcome.map_err(anyhow::Error::msg)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        for child in &mut self.children {
            // An error means that it has ended already, which is what is wanted.
            if child.kill().is_ok() {
                let _ = child.wait();
            }
        }
    }
}

/// virtiofsd for each of the VMs "bench" and "other".
fn virtiofs(dir: &Path, export: &Path) -> Result<Server> {
    let program =
        find(&[C_VIRTIOFSD, "/usr/libexec/virtiofsd"], "virtiofsd").context("virtiofsd is not installed")?;
    let mut server = Server::new(format!("{}, no DAX, cache off", version(&program, "--version")));
    for vm in ["bench", "other"] {
        let socket = dir.join(format!("virtiofs-{vm}.sock"));
        let mut command = Command::new(&program);
        command.arg(format!("--socket-path={}", socket.display()));
        if program == Path::new(C_VIRTIOFSD) {
            command.args(["-o", &format!("source={}", export.display()), "-o", "cache=none"]);
        } else {
            // Its sandbox needs a root that is a mount, which a container's need not be; the guests are the bench's own.
            command.arg(format!("--shared-dir={}", export.display()));
            command.args(["--cache=never", "--sandbox=none"]);
        }
        server.spawn(&mut command, &dir.join(format!("virtiofsd-{vm}.log")), || Ok(socket.exists()))?;
        server.sockets.push((vm.to_owned(), socket));
    }
    Ok(server)
}

/// nfs-ganesha on the host's loopback address.
fn nfs(dir: &Path, export: &Path) -> Result<Server> {
    let program = find(&["/usr/bin/ganesha.nfsd"], "ganesha.nfsd")
        .context("no NFS server is installed (package nfs-ganesha-vfs)")?;
    let version = version(&program, "-v");
    let mut server = Server::new(format!("NFS 4.1 by {version}, over QEMU's user network"));
    let state = dir.join("ganesha");
    fs::create_dir(&state)?;
    let config = dir.join("ganesha.conf");
    // From version 6 on, ganesha ends where it may not tell the kernel that it serves IO (prctl PR_SET_IO_FLUSHER needs
    // CAP_SYS_RESOURCE, which a container lacks), unless it is told to go on; earlier versions don't know the word.
    let major = version.split(|c: char| !c.is_ascii_digit()).find(|word| !word.is_empty());
    let flusher = match major.and_then(|word| word.parse::<u32>().ok()) {
        Some(6..) => "allow_set_io_flusher_fail = true;",
        _ => "",
    };
    fs::write(
        &config,
        format!(
            "NFS_CORE_PARAM {{ Protocols = 4; NFS_Port = {NFS_PORT}; Bind_addr = 127.0.0.1; Enable_UDP = false; \
             Enable_NLM = false; Enable_RQUOTA = false; {flusher} }}\n\
             NFSv4 {{ Graceless = true; RecoveryRoot = \"{state}\"; Minor_Versions = 1; }}\n\
             EXPORT {{ Export_Id = 1; Path = \"{export}\"; Pseudo = /bench; Access_Type = RW; Squash = None; SecType = sys; \
             Transports = TCP; Protocols = 4; FSAL {{ Name = VFS; }} }}\n",
            state = state.display(),
            export = export.display()
        ),
    )?;
    if TcpStream::connect(("127.0.0.1", NFS_PORT)).is_ok() {
        bail!("port {NFS_PORT} on 127.0.0.1 is in use, by another bench's NFS server perhaps");
    }
    let log = dir.join("ganesha.log");
    let mut command = Command::new(program);
    command.arg("-F").arg("-f").arg(&config).arg("-L").arg(&log).arg("-p").arg(dir.join("ganesha.pid"));
    server
        .spawn(&mut command, &dir.join("ganesha.out"), || match TcpStream::connect(("127.0.0.1", NFS_PORT)) {
            Ok(_) => Ok(true),
            Err(e) if e.kind() == ErrorKind::ConnectionRefused => Ok(false),
            Err(e) => bail!("the NFS server does not answer on 127.0.0.1:{NFS_PORT}: {e}"),
        })
        .with_context(|| format!("its log: {}", end_of(&log)))?;
    Ok(server)
}

impl Servers {
    /// Starts what is installed; `export` is the folder to serve. VMs are called "bench" and "other".
    pub fn start(dir: &Path, export: &Path) -> Servers {
        let reason = |error: anyhow::Error| format!("{error:#}");
        Servers { virtiofs: virtiofs(dir, export).map_err(reason), nfs: nfs(dir, export).map_err(reason) }
    }

    /// The peers without a server: name and reason.
    pub fn left_out(&self) -> impl Iterator<Item = (&'static str, &str)> {
        [("virtiofs", &self.virtiofs), ("nfs", &self.nfs)]
            .into_iter()
            .filter_map(|(system, server)| Some((system, server.as_ref().err()?.as_str())))
    }

    /// Devices for a VM; `pmem`: a file in memory and its size in MiB, for ext4.
    pub fn qemu_args(&self, vm: &str, pmem: Option<(&Path, u32)>) -> Vec<String> {
        let mut args = Vec::new();
        if let Some((file, mb)) = pmem {
            args.extend([
                "-object".into(),
                format!("memory-backend-file,id=dax,mem-path={},size={mb}M,share=on", file.display()),
                "-device".into(),
                "virtio-pmem-pci,memdev=dax".into(),
            ]);
        }
        let sockets = self.virtiofs.iter().flat_map(|server| &server.sockets);
        for (_, socket) in sockets.filter(|(name, _)| name == vm) {
            args.extend(["-chardev".into(), format!("socket,id=vfs,path={}", socket.display())]);
            args.extend(["-device".into(), "vhost-user-fs-pci,chardev=vfs,tag=virtiofs".into()]);
        }
        if self.nfs.is_ok() {
            args.extend([
                "-netdev".into(),
                "user,id=nfs".into(),
                "-device".into(),
                "virtio-net-pci,netdev=nfs,romfile=".into(),
            ]);
        }
        args
    }

    pub fn versions(&self) -> Vec<String> {
        [&self.virtiofs, &self.nfs].into_iter().flatten().map(|server| server.version.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_ends_at_once_is_a_reason_with_its_last_words() {
        let dir = tempfile::tempdir().unwrap();
        let mut server = Server::new("test 1".into());
        let mut command = Command::new("sh");
        command.args(["-c", "echo starting; echo 'no permission' >&2; exit 3"]);
        let error = server.spawn(&mut command, &dir.path().join("log"), || Ok(false)).unwrap_err();
        let said = format!("{error:#}");
        assert!(said.contains("exit status: 3") && said.contains("no permission"), "{said}");
    }
}
