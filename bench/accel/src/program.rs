// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The server, and the program that measures (`opencl.c`), natively, forwarded, and in a VM.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_setaffinity};
use tombolo_bench_project::kit::Kit;
use tombolo_bench_project::{Project, interrupt};

/// A folder with what a run needs: the program, the driver's cache, sockets.
pub struct Place {
    folder: tempfile::TempDir,
    library: PathBuf,
    tcp: String,
}

impl Place {
    /// Compiles the program; `library` is the client library.
    pub fn new(library: &Path) -> Result<Place> {
        ensure!(library.is_file(), "{} is not there; --library says where it is", library.display());
        let folder = tempfile::tempdir()?;
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("opencl.c");
        let compiled = Command::new("cc")
            .args(["-O2", "-o"])
            .arg(folder.path().join("opencl"))
            .arg(&source)
            .args(["-lOpenCL", "-lclblast"])
            .status()
            .context("can't run cc (packages gcc, ocl-icd-opencl-dev, libclblast-dev)")?;
        ensure!(compiled.success(), "can't compile {}", source.display());
        for name in ["cache", "vendors"] {
            std::fs::create_dir(folder.path().join(name))?;
        }
        let library = std::path::absolute(library)?;
        std::fs::write(folder.path().join("vendors/tombolo.icd"), library.display().to_string())?;
        // The port is free, and no other program is about to take it.
        let tcp = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?;
        Ok(Place { folder, library, tcp: format!("tcp:{tcp}") })
    }

    /// The path of something in the folder.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The server's address.
    pub fn address(&self) -> String {
        format!("unix:{}", self.path("socket").display())
    }

    /// The same server's address over TCP.
    pub fn tcp(&self) -> &str {
        &self.tcp
    }

    /// Starts a VM of the guest kit in the folder `kit`, whose programs have this host's devices, and runs the program in it.
    pub fn vm(&self, kit: &Path, kernel: &str) -> Result<(Project, Program)> {
        let kit = Kit::new(kit, kernel).context("--no-vms goes without")?;
        let (library, vendors) = (self.path("libtombolo-opencl.so"), self.path("guest-vendors"));
        std::fs::create_dir_all(&vendors)?;
        std::fs::write(vendors.join("tombolo.icd"), "/usr/lib/libtombolo-opencl.so\n")?;
        let image = self.path("initrd.img");
        let place = |path: &Path, to: &str| format!("{}:{to}", path.display());
        // Without what only a debugger reads; a guest's image is memory.
        let stripped = Command::new("strip").arg("-o").args([&library, &self.library]).status();
        ensure!(stripped.context("strip (package binutils)")?.success(), "strip failed");
        let program = self.path("opencl").display().to_string();
        let places =
            [place(&library, "/usr/lib/libtombolo-opencl.so"), place(&vendors, "/etc/OpenCL/vendors")];
        kit.add(&[&[program][..], &places].concat(), &image)?;
        let compose = format!(
            "name = \"bench-accel\"\n[accel.cl]\nchannels = 1\n\
             [vm.a]\nkernel = {:?}\ninitrd = {image:?}\nmemory = \"768M\"\naccelerators = [\"cl\"]\n",
            kit.kernel(),
        );
        let project = Project::up(self.folder.path(), &compose)?;
        let program = Program::of(project.program("a", "opencl"))?;
        Ok((project, program))
    }

    /// Runs the program; `None`: natively, otherwise forwarded to this address.
    pub fn program(&self, server: Option<&str>) -> Result<Program> {
        Program::of(self.with_driver(&self.path("opencl"), server))
    }

    /// The command of a program, natively or forwarded in the same way.
    pub fn with_driver(&self, program: &Path, server: Option<&str>) -> Command {
        let mut command = Command::new(program);
        command.env("POCL_CACHE_DIR", self.path("cache")).env_remove("OCL_ICD_VENDORS");
        if let Some(server) = server {
            command.env("TOMBOLO_ACCEL", server).env("OCL_ICD_VENDORS", self.path("vendors"));
        }
        command
    }

    /// Starts a server. Each of its workers compiles for itself, also those of older servers, which would share a folder that is named; so a program
    /// compiles before it measures, however it runs.
    pub fn serve(&self) -> Result<Server> {
        let mut command = Command::new(tombolo_bench_project::tombolo());
        command
            .args(["accel", "serve", "--listen", &self.address(), "--listen", &self.tcp, "--control"])
            .arg(self.path("control"))
            .env_remove("POCL_CACHE_DIR")
            .env_remove("OCL_ICD_VENDORS");
        Server::start(command, &self.path("socket"))
    }
}

/// A running server; ended when dropped.
pub struct Server {
    child: Child,
}

impl Server {
    /// Runs a server's command until the server listens at a socket.
    pub fn start(mut command: Command, socket: &Path) -> Result<Server> {
        let mut server = Server { child: command.spawn().context("the server can't be started")? };
        let begun = Instant::now();
        // A socket has its name before it listens.
        while UnixStream::connect(socket).is_err() {
            ensure!(server.child.try_wait()?.is_none(), "the server ended");
            ensure!(begun.elapsed() < Duration::from_secs(30), "the server doesn't listen");
            std::thread::yield_now();
        }
        Ok(server)
    }

    /// Processor seconds of the server and its workers so far.
    pub fn cpu(&self) -> Result<f64> {
        let mut sum = cpu_seconds(self.child.id())?;
        for worker in self.workers()? {
            sum += cpu_seconds(worker)?;
        }
        Ok(sum)
    }

    /// Binds all threads of the youngest worker to a processor.
    pub fn pin(&self, cpu: usize) -> Result<()> {
        let Some(pid) = self.workers()?.into_iter().max_by_key(|pid| begun(*pid)) else { bail!("no worker") };
        let mut cpus = CpuSet::new();
        cpus.set(cpu);
        for task in std::fs::read_dir(format!("/proc/{pid}/task"))? {
            let tid = task?.file_name().to_string_lossy().parse()?;
            sched_setaffinity(Pid::from_raw(tid), &cpus)?;
        }
        Ok(())
    }

    /// Waits until at most so many workers are left: one that is deaf to the end of its client lives on for a while.
    ///
    /// # Errors
    /// More live on for longer than a server lets them.
    pub fn wait_until_left(&self, count: usize) -> Result<()> {
        let begun = Instant::now();
        while self.workers()?.len() > count {
            interrupt::check()?;
            ensure!(begun.elapsed() < Duration::from_secs(30), "a client's worker lives on without it");
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// The process IDs of its workers.
    pub fn workers(&self) -> Result<Vec<u32>> {
        let pid = self.child.id();
        let mut found = Vec::new();
        for task in std::fs::read_dir(format!("/proc/{pid}/task"))? {
            // A thread may have ended just now.
            let Ok(text) = std::fs::read_to_string(task?.path().join("children")) else { continue };
            found.extend(text.split_whitespace().filter_map(|w| w.parse::<u32>().ok()));
        }
        Ok(found)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ended = self.child.kill();
        let _reaped = self.child.wait();
    }
}

/// When a process was started, in ticks.
fn begun(pid: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let field = stat.rsplit(')').next().unwrap_or_default().split_whitespace().nth(19);
    field.and_then(|f| f.parse().ok()).unwrap_or(0)
}

/// Processor time that a process has used, in seconds.
fn cpu_seconds(pid: u32) -> Result<f64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    let ticks: f64 = [11, 12].iter().filter_map(|i| fields.get(*i)?.parse::<f64>().ok()).sum();
    Ok(ticks / rustix::param::clock_ticks_per_second() as f64)
}

/// A running program.
pub struct Program {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Program {
    /// Runs a program that answers questions.
    pub fn of(mut command: Command) -> Result<Program> {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            bail!("the program has no pipes");
        };
        Ok(Program { child, input, output: BufReader::new(output) })
    }

    /// Begins a measurement.
    pub fn tell(&mut self, what: &str) -> Result<()> {
        writeln!(self.input, "{what}").context("the program ended")
    }

    /// Its result, and the processor seconds that the program used.
    pub fn hear(&mut self) -> Result<(f64, f64)> {
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        let numbers: Vec<f64> = line.split_whitespace().filter_map(|w| w.parse().ok()).collect();
        match numbers[..] {
            [result, cpu] => Ok((result, cpu)),
            _ => bail!("the program ended; what it said stands above"),
        }
    }

    /// Measures.
    pub fn ask(&mut self, what: &str) -> Result<(f64, f64)> {
        self.tell(what)?;
        self.hear().with_context(|| what.to_owned())
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ended = self.child.kill();
        let _reaped = self.child.wait();
    }
}
