// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The systems that are compared: how each is mounted in the guest, and the servers on the host that some need. 9p, virtiofs
//! and NFS export one and the same folder in the host's memory.

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

const NFS_PORT: u16 = 20499;

/// One system in the guest.
pub struct Peer {
    /// Its name in results.
    pub system: &'static str,
    /// The folder to work in.
    pub dir: String,
    /// The script that makes `dir` usable.
    pub mount: String,
    /// Whether another VM sees the same files.
    pub shared: bool,
}

impl Peer {
    /// All that can run here, Tombolo first.
    pub fn all(servers: &Servers) -> Vec<Peer> {
        let mut peers = vec![
            Peer {
                system: "tombolo",
                dir: "/mnt/tombolo".into(),
                mount: "grep -q ' /mnt/tombolo tombolo ' /proc/mounts".into(),
                shared: true,
            },
            Peer {
                system: "ext4-dax",
                dir: "/mnt/dax".into(),
                // The virtio-pmem device that is no zone.
                mount: "set -e; dev=; for d in /dev/pmem*; do \
                        if [ \"$(dd if=$d bs=8 count=1 2>/dev/null | tr -d '\\0')\" != TOMBZONE ]; then dev=$d; fi; done; \
                        mkfs.ext4 -q -F -b 4096 -E lazy_itable_init=0,lazy_journal_init=0 $dev; \
                        mkdir -p /mnt/dax; mount -t ext4 -o dax=always $dev /mnt/dax"
                    .into(),
                shared: false,
            },
            Peer {
                system: "tmpfs",
                dir: "/mnt/tmpfs".into(),
                mount: "mkdir -p /mnt/tmpfs && mount -t tmpfs -o size=90% tmpfs /mnt/tmpfs".into(),
                shared: false,
            },
            Peer {
                system: "9p",
                dir: "/mnt/9p/9p".into(),
                mount: "mkdir -p /mnt/9p && mount -t 9p -o trans=virtio,version=9p2000.L,msize=524288 export /mnt/9p && mkdir -p /mnt/9p/9p"
                    .into(),
                shared: true,
            },
        ];
        if servers.virtiofsd.is_some() {
            peers.push(Peer {
                system: "virtiofs",
                dir: "/mnt/virtiofs/virtiofs".into(),
                mount: "mkdir -p /mnt/virtiofs && mount -t virtiofs virtiofs /mnt/virtiofs && mkdir -p /mnt/virtiofs/virtiofs".into(),
                shared: true,
            });
        }
        if servers.ganesha.is_some() {
            peers.push(Peer {
                system: "nfs",
                dir: "/mnt/nfs/nfs".into(),
                mount: format!(
                    "set -e; ip link set eth0 up; ip addr add 10.0.2.15/24 dev eth0; mkdir -p /mnt/nfs; \
                     mount -t nfs4 -o port={NFS_PORT},vers=4.1,sec=sys,proto=tcp 10.0.2.2:/bench /mnt/nfs; mkdir -p /mnt/nfs/nfs"
                ),
                shared: true,
            });
        }
        peers
    }
}

/// Servers on the host, ended when dropped.
pub struct Servers {
    virtiofsd: Option<(PathBuf, Vec<(String, PathBuf)>)>,
    ganesha: Option<PathBuf>,
    children: Vec<Child>,
}

/// A program at one of these places, or found by its name as a shell finds it.
fn find(places: &[&str], name: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let by_name = env::split_paths(&path).map(|folder| folder.join(name));
    places.iter().map(PathBuf::from).chain(by_name).find(|p| p.is_file())
}

/// QEMU 7.2's own virtiofsd; later ones, in Rust, have other options.
const C_VIRTIOFSD: &str = "/usr/lib/qemu/virtiofsd";

fn spawn(command: &mut Command, log: &Path) -> Result<Child> {
    let out = fs::File::create(log).with_context(|| format!("can't write {}", log.display()))?;
    command.stdin(Stdio::null()).stdout(out.try_clone()?).stderr(out);
    // SAFETY: prctl(2) is async-signal-safe and touches no memory of the parent.
    unsafe {
        command.pre_exec(|| {
            rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::TERM))
                .map_err(Into::into)
        });
    }
    command.spawn().with_context(|| format!("can't start {}", command.get_program().to_string_lossy()))
}

impl Servers {
    /// Starts what is installed; `export` is the folder to serve. VMs are called "bench" and "other".
    pub fn start(dir: &Path, export: &Path) -> Result<Servers> {
        let mut servers = Servers { virtiofsd: None, ganesha: None, children: Vec::new() };
        if let Some(program) = find(&[C_VIRTIOFSD, "/usr/libexec/virtiofsd"], "virtiofsd") {
            let rust = program != Path::new(C_VIRTIOFSD);
            let mut sockets = Vec::new();
            for vm in ["bench", "other"] {
                let socket = dir.join(format!("virtiofs-{vm}.sock"));
                let mut command = Command::new(&program);
                command.arg(format!("--socket-path={}", socket.display()));
                if rust {
                    command.arg(format!("--shared-dir={}", export.display())).arg("--cache=never");
                } else {
                    command.args(["-o", &format!("source={}", export.display()), "-o", "cache=none"]);
                }
                servers.children.push(spawn(&mut command, &dir.join(format!("virtiofsd-{vm}.log")))?);
                sockets.push((vm.to_owned(), socket));
            }
            servers.virtiofsd = Some((program, sockets));
            servers.await_sockets()?;
        }
        if let Some(program) = find(&["/usr/bin/ganesha.nfsd"], "ganesha.nfsd") {
            servers.start_ganesha(&program, dir, export)?;
            servers.ganesha = Some(program);
        }
        Ok(servers)
    }

    fn await_sockets(&mut self) -> Result<()> {
        let sockets: Vec<PathBuf> =
            self.virtiofsd.iter().flat_map(|(_, s)| s.iter().map(|(_, p)| p.clone())).collect();
        let until = Instant::now() + Duration::from_secs(20);
        while !sockets.iter().all(|s| s.exists()) {
            self.check_children()?;
            if Instant::now() > until {
                bail!("virtiofsd made no socket within 20 s");
            }
            thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    fn check_children(&mut self) -> Result<()> {
        for child in &mut self.children {
            if let Some(status) = child.try_wait()? {
                bail!("a server for a peer ended at once ({status}); its log is beside its socket");
            }
        }
        Ok(())
    }

    fn start_ganesha(&mut self, program: &Path, dir: &Path, export: &Path) -> Result<()> {
        let state = dir.join("ganesha");
        fs::create_dir(&state)?;
        let config = dir.join("ganesha.conf");
        fs::write(
            &config,
            format!(
                "NFS_CORE_PARAM {{ Protocols = 4; NFS_Port = {NFS_PORT}; Bind_addr = 127.0.0.1; Enable_UDP = false; \
                 Enable_NLM = false; Enable_RQUOTA = false; }}\n\
                 NFSv4 {{ Graceless = true; RecoveryRoot = \"{state}\"; Minor_Versions = 1; }}\n\
                 EXPORT {{ Export_Id = 1; Path = \"{export}\"; Pseudo = /bench; Access_Type = RW; Squash = None; SecType = sys; \
                 Transports = TCP; Protocols = 4; FSAL {{ Name = VFS; }} }}\n",
                state = state.display(),
                export = export.display()
            ),
        )?;
        let mut command = Command::new(program);
        command
            .arg("-F")
            .arg("-f")
            .arg(&config)
            .arg("-L")
            .arg(dir.join("ganesha.log"))
            .arg("-p")
            .arg(dir.join("ganesha.pid"));
        self.children.push(spawn(&mut command, &dir.join("ganesha.out"))?);
        let until = Instant::now() + Duration::from_secs(30);
        loop {
            match TcpStream::connect(("127.0.0.1", NFS_PORT)) {
                Ok(_) => return Ok(()),
                Err(e) if e.kind() == ErrorKind::ConnectionRefused && Instant::now() < until => {}
                Err(e) => bail!("the NFS server does not answer on 127.0.0.1:{NFS_PORT}: {e}"),
            }
            self.check_children()?;
            thread::sleep(Duration::from_millis(50));
        }
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
        if let Some((_, sockets)) = &self.virtiofsd {
            for (_, socket) in sockets.iter().filter(|(name, _)| name == vm) {
                args.extend(["-chardev".into(), format!("socket,id=vfs,path={}", socket.display())]);
                args.extend(["-device".into(), "vhost-user-fs-pci,chardev=vfs,tag=virtiofs".into()]);
            }
        }
        if self.ganesha.is_some() {
            args.extend([
                "-netdev".into(),
                "user,id=nfs".into(),
                "-device".into(),
                "virtio-net-pci,netdev=nfs,romfile=".into(),
            ]);
        }
        args
    }

    /// What the peers are, and what is left out because it is not installed.
    pub fn versions(&self) -> Vec<String> {
        let first_line = |program: &Path, arg: &str| {
            Command::new(program)
                .arg(arg)
                .output()
                .ok()
                .and_then(|o| String::from_utf8_lossy(&o.stdout).lines().next().map(str::to_owned))
                .unwrap_or_else(|| program.display().to_string())
        };
        vec![
            self.virtiofsd.as_ref().map_or("no virtiofsd installed: virtiofs left out".into(), |(p, _)| {
                format!("{}, no DAX, cache off", first_line(p, "--version"))
            }),
            self.ganesha
                .as_ref()
                .map_or("no NFS server (nfs-ganesha-vfs) installed: nfs left out".into(), |p| {
                    format!("NFS 4.1 by {}, over QEMU's user network", first_line(p, "-v"))
                }),
        ]
    }
}

impl Drop for Servers {
    fn drop(&mut self) {
        for child in &mut self.children {
            // An error means that it has ended already, which is what is wanted.
            if child.kill().is_ok() {
                let _ = child.wait();
            }
        }
    }
}
