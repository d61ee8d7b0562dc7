// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The peers' servers on the host, which export one and the same folder in the host's memory. A server that is not installed, or that
//! ends or stays silent when it is started, leaves its system out with a reason; the others go on.

use std::env;
use std::fs;
use std::io::ErrorKind;
use std::net::TcpStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use super::network::{HOST, Network};
use super::systems::{Needs, System};

/// The NFS server's port.
const NFS_PORT: u16 = 20499;

/// QEMU 7.2's own virtiofsd; later ones, in Rust, have other options, and may have a link here.
const C_VIRTIOFSD: &str = "/usr/lib/qemu/virtiofsd";

/// A system's server: its version for the results file, its processes, which end when this is dropped, and what its guests need.
pub struct Server {
    version: String,
    children: Vec<Child>,
    /// By VM: QEMU's arguments, and the script that comes before mount(8).
    guests: Vec<(String, Vec<String>, String)>,
}

/// The servers of the systems that need one, or why a system has none.
pub struct Servers(Vec<(&'static str, Result<Server, String>)>);

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
        Server { version, children: Vec::new(), guests: Vec::new() }
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

/// virtiofsd of one system for each of the VMs. `cache`: as QEMU's own calls it, and as the one in Rust does.
fn virtiofs(
    dir: &Path,
    export: &Path,
    vms: &[&str],
    name: &str,
    cache: [&str; 2],
    writeback: bool,
) -> Result<Server> {
    let program =
        find(&[C_VIRTIOFSD, "/usr/libexec/virtiofsd"], "virtiofsd").context("virtiofsd is not installed")?;
    let mut server = Server::new(version(&program, "--version"));
    for vm in vms {
        let socket = dir.join(format!("{name}-{vm}.sock"));
        let mut command = Command::new(&program);
        command.arg(format!("--socket-path={}", socket.display()));
        if program == Path::new(C_VIRTIOFSD) {
            command.args(["-o", &format!("source={}", export.display())]);
            command.args(["-o", &format!("cache={}{}", cache[0], if writeback { ",writeback" } else { "" })]);
        } else {
            // Its sandbox needs a root that is a mount, which a container's need not be; the guests are the bench's own.
            command.arg(format!("--shared-dir={}", export.display()));
            command.arg(format!("--cache={}", cache[1])).arg("--sandbox=none");
            command.args(writeback.then_some("--writeback"));
        }
        server.spawn(&mut command, &dir.join(format!("{name}-{vm}.log")), || Ok(socket.exists()))?;
        let arguments = [
            "-chardev".into(),
            format!("socket,id={name},path={}", socket.display()),
            "-device".into(),
            format!("vhost-user-fs-pci,chardev={name},tag={name}"),
        ];
        server.guests.push(((*vm).to_owned(), arguments.to_vec(), String::new()));
    }
    Ok(server)
}

/// Without its table of mounts nfs-ganesha starts, and exports nothing.
fn check_mount_table(table: &Path) -> Result<()> {
    ensure!(
        table.exists(),
        "{0} is missing, in which nfs-ganesha finds file systems: ln -s ../proc/self/mounts {0}",
        table.display()
    );
    Ok(())
}

/// nfs-ganesha, where only the guests and this host reach it.
fn nfs(dir: &Path, export: &Path, vms: &[&str]) -> Result<Server> {
    let program = find(&["/usr/bin/ganesha.nfsd"], "ganesha.nfsd")
        .context("no NFS server is installed (package nfs-ganesha-vfs)")?;
    check_mount_table(Path::new("/etc/mtab"))?;
    let version = version(&program, "-v");
    let network = Network::new(vms);
    let mut server = Server::new(format!("NFS 4.1 by {version}, over {}", network.description));
    let variables = format!("nfs_host={HOST} nfs_port={NFS_PORT}");
    for vm in vms {
        let setup = format!("{}; {variables}", network.setup(vm));
        server.guests.push(((*vm).to_owned(), network.qemu_args(vm), setup));
    }
    let listen = network.listen;
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
            "NFS_CORE_PARAM {{ Protocols = 4; NFS_Port = {NFS_PORT}; Bind_addr = {listen}; Enable_UDP = false; \
             Enable_NLM = false; Enable_RQUOTA = false; {flusher} }}\n\
             NFSv4 {{ Graceless = true; RecoveryRoot = \"{state}\"; Minor_Versions = 1; }}\n\
             EXPORT {{ Export_Id = 1; Path = \"{export}\"; Pseudo = /bench; Access_Type = RW; Squash = None; SecType = sys; \
             Transports = TCP; Protocols = 4; FSAL {{ Name = VFS; }} }}\n",
            state = state.display(),
            export = export.display()
        ),
    )?;
    if TcpStream::connect((listen, NFS_PORT)).is_ok() {
        bail!("port {NFS_PORT} on {listen} is in use, by another bench's NFS server perhaps");
    }
    let log = dir.join("ganesha.log");
    let mut command = Command::new(program);
    command.arg("-F").arg("-f").arg(&config).arg("-L").arg(&log).arg("-p").arg(dir.join("ganesha.pid"));
    server
        .spawn(&mut command, &dir.join("ganesha.out"), || match TcpStream::connect((listen, NFS_PORT)) {
            Ok(_) => Ok(true),
            Err(e) if e.kind() == ErrorKind::ConnectionRefused => Ok(false),
            Err(e) => bail!("the NFS server does not answer on {listen}:{NFS_PORT}: {e}"),
        })
        .with_context(|| format!("its log: {}", end_of(&log)))?;
    // Version 6 passes over tmpfs when it looks for file systems, and serves an empty tree.
    let said = fs::read_to_string(&log).with_context(|| format!("can't read {}", log.display()))?;
    ensure!(!said.contains("Could not create export"), "{version} exports nothing of a tmpfs");
    Ok(server)
}

/// The script that finds the virtio-pmem device that is no zone, and makes a file system there.
const PMEM: &str = "dev=; for d in /dev/pmem*; do \
    if [ \"$(dd if=$d bs=8 count=1 2>/dev/null | tr -d '\\0')\" != TOMBZONE ]; then dev=$d; fi; done; \
    mkfs.ext4 -q -F -b 4096 -E lazy_itable_init=0,lazy_journal_init=0 $dev";

/// The script that makes a zone of `mib` MiB in the guest's memory and mounts it as a host does.
pub fn own_zone(system: &System, backend: &str, mib: u32) -> String {
    let at = format!("/mnt/{}", system.name);
    format!(
        "mkdir -p /zones/of-{name} {at}; mount -t tmpfs -o size=100% tmpfs /zones/of-{name}; zone=/zones/of-{name}/zone; \
         tombolo() {{ LD_LIBRARY_PATH=/bench/lib /bench/tombolo \"$@\"; }}; modprobe fuse; \
         tombolo zone create $zone --size {mib}M >/dev/null; tombolo files mkfs $zone >/dev/null; \
         tombolo files mount --backend {backend} $zone {at} >/dev/null",
        name = system.name
    )
}

impl Servers {
    /// Starts what the systems need and what is installed; `export` is the folder to serve.
    pub fn start(dir: &Path, export: &Path, systems: &[&'static System], vms: &[&str]) -> Servers {
        let server = |system: &&'static System| {
            let server = match system.needs {
                Needs::Virtiofs { cache, writeback } => {
                    virtiofs(dir, export, vms, system.name, cache, writeback)
                }
                Needs::Nfs => nfs(dir, export, vms),
                Needs::Zone | Needs::Nothing | Needs::Pmem | Needs::P9 | Needs::OwnZone(_) => return None,
            };
            Some((system.name, server.map_err(|error| format!("{error:#}"))))
        };
        Servers(systems.iter().filter_map(server).collect())
    }

    /// The systems without their server: name and reason.
    pub fn left_out(&self) -> impl Iterator<Item = (&'static str, &str)> {
        self.0.iter().filter_map(|(system, server)| Some((*system, server.as_ref().err()?.as_str())))
    }

    fn running(&self) -> impl Iterator<Item = (&'static str, &Server)> {
        self.0.iter().filter_map(|(system, server)| Some((*system, server.as_ref().ok()?)))
    }

    /// Their processes.
    pub fn processes(&self) -> Vec<u32> {
        self.running().flat_map(|(_, server)| &server.children).map(Child::id).collect()
    }

    /// QEMU's arguments for a VM.
    pub fn qemu_args(&self, vm: &str) -> Vec<String> {
        let guests = self.running().flat_map(|(_, server)| &server.guests);
        guests.filter(|(name, ..)| name == vm).flat_map(|(_, arguments, _)| arguments.clone()).collect()
    }

    /// The script that comes before a system's mount in a VM, and sets the variables that its arguments name.
    pub fn setup(&self, system: &System, vm: &str) -> &str {
        if system.needs == Needs::Pmem {
            return PMEM;
        }
        let own = self.running().filter(|(name, _)| *name == system.name).flat_map(|(_, s)| &s.guests);
        own.into_iter().find(|(name, ..)| name == vm).map_or("", |(.., setup)| setup.as_str())
    }

    /// Each server's version, once.
    pub fn versions(&self) -> Vec<String> {
        let mut versions: Vec<String> = Vec::new();
        for (_, server) in self.running() {
            if !versions.contains(&server.version) {
                versions.push(server.version.clone());
            }
        }
        versions
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_without_a_table_of_mounts_is_named_with_the_remedy() {
        let said = check_mount_table(Path::new("/nowhere/mtab")).unwrap_err().to_string();
        assert!(!said.contains('\n') && said.ends_with("ln -s ../proc/self/mounts /nowhere/mtab"), "{said}");
    }

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
