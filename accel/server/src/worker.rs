// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The life of one worker: it shakes hands with its client, gives up what it doesn't need, loads the driver, and serves until the
//! client is gone.

use crate::account::Account;
use crate::cuda::Cuda;
use crate::device::Device;
use crate::figures::Figures;
use crate::limits::{Bucket, Limits};
use crate::opencl::OpenCl;
use crate::session::{Api, Session};
use crate::wall::calls::Again;
use crate::wall::{self, Wall};
use crate::workers::Place;
use anyhow::{Context, bail};
use std::fs::{File, Permissions};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;
use tempfile::TempDir;
use tombolo_accel_spec::{cuda, opencl};
use tombolo_calls::hello::{Geometry, Hello};
use tombolo_calls::say;
use tombolo_calls::{Error, Link, process, stream, zone};

/// The descriptor a worker finds the page of its figures at.
pub const FIGURES_FD: i32 = 3;
/// The descriptor a worker finds its client's socket at. A pipe follows, with the client's hello; for a VM's process memory, bell, doorbell and the account's two files.
pub const SOCKET_FD: i32 = FIGURES_FD + 1;
/// The VM's doorbell gets the last number below this: what a driver starts never has one so high.
const DESCRIPTORS: u64 = 1024;

/// Set where devices are the native ones: an OpenCL driver of ours shows none there.
pub const NATIVE: &str = "TOMBOLO_ACCEL_SERVER";

/// The wall of a worker.
pub struct Behind {
    pub wall: Wall,
    /// The number of the socket for [`wall::exec`].
    pub executions: Option<RawFd>,
}

/// The client that the worker was started for.
enum Caller {
    /// The client at a socket's other end, and its hello.
    Socket(OwnedFd, Hello),
    /// A process of a VM, and the number of the VM's doorbell.
    Channel(zone::Greeted, RawFd),
}

impl Caller {
    fn hello(&self) -> &Hello {
        match self {
            Caller::Socket(_, hello) => hello,
            Caller::Channel(greeted, _) => &greeted.hello,
        }
    }

    fn doorbell(&self) -> Option<RawFd> {
        match self {
            Caller::Socket(..) => None,
            Caller::Channel(_, doorbell) => Some(*doorbell),
        }
    }

    fn refuse(self, why: &str) -> anyhow::Result<()> {
        match self {
            Caller::Socket(socket, _) => stream::refuse(&socket, why).context("refusing"),
            Caller::Channel(greeted, _) => greeted.refuse(why).context("refusing"),
        }
    }

    fn accept(self, limits: &Limits) -> anyhow::Result<Link> {
        let geometry = Geometry { window: limits.window, ..Geometry::default() };
        match self {
            Caller::Socket(socket, _) if is_unix(&socket)? => {
                process::accept(UnixStream::from(socket), geometry)
            }
            Caller::Socket(socket, _) => stream::accept(socket, geometry),
            Caller::Channel(greeted, _) => greeted.accept(),
        }
        .context("handshake")
    }
}

/// Gives a descriptor a number that the programs which a driver starts don't use: the filter of system calls, which is theirs too, knows it by its number.
fn out_of_the_way(fd: OwnedFd) -> std::io::Result<OwnedFd> {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    let last = limit.unwrap_or(DESCRIPTORS).min(DESCRIPTORS) - 1;
    Ok(rustix::io::fcntl_dupfd_cloexec(&fd, last as RawFd)?)
}

/// None: it left before it had said who it is.
fn called(place: Option<&Place>) -> anyhow::Result<Option<Caller>> {
    // SAFETY: the supervisor put the client's socket (or one of its own) there; this is its only owner.
    let passed = |n: i32| unsafe { OwnedFd::from_raw_fd(SOCKET_FD + n) };
    let socket = passed(0);
    if let Some(&Place { at, ring, window, .. }) = place {
        let geometry = Geometry { ring, window };
        let (memory, bell) = (File::from(passed(1)), passed(2));
        let doorbell = out_of_the_way(passed(3)).context("the VM's doorbell")?;
        let number = doorbell.as_raw_fd();
        let channel = zone::Channel { memory, at, geometry, bell, doorbell, gone: socket };
        return match zone::greet(channel) {
            Ok(greeted) => Ok(Some(Caller::Channel(greeted, number))),
            Err(Error::Closed) => Ok(None),
            Err(e) => Err(e).context("handshake"),
        };
    }
    let hello = Hello::receive(&mut File::from(passed(1))).context("the client's hello")?;
    Ok(Some(Caller::Socket(socket, hello)))
}

/// Serves the client whose socket, or whose channel in a VM's zone, was passed.
pub fn run(
    limits: &Limits,
    place: Option<Place>,
    wall: Option<Behind>,
    scratch: Option<PathBuf>,
) -> anyhow::Result<()> {
    // It was started by a name that only this process understands (/proc/self/exe).
    // SAFETY: the name ends with a zero.
    unsafe { libc::prctl(libc::PR_SET_NAME, c"accel-worker".as_ptr()) };
    share_by_session(limits.nice());
    enter(wall.as_ref(), scratch)?;
    // A panic in any thread ends this client's worker: no thread works on with a half-changed value.
    let say = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        say(panic);
        std::process::abort();
    }));
    // SAFETY: the supervisor put it there; this is its only owner.
    let page = File::from(unsafe { OwnedFd::from_raw_fd(FIGURES_FD) });
    let figures = Figures::of(&page).context("the page of figures")?;
    let account = place.as_ref().map(|place| {
        // SAFETY: as above; they are the last that are passed.
        let files = [4, 5].map(|n| File::from(unsafe { OwnedFd::from_raw_fd(SOCKET_FD + n) }));
        Account::of([&files[0], &files[1]], place.channel)
    });
    let account = account.transpose().context("the VM's account")?.map(Arc::new);
    let bucket = Bucket::new(limits.rate, account.clone());
    let Some(caller) = called(place.as_ref())? else { return Ok(()) };
    let hello = caller.hello().clone();
    figures.set_name(&hello.name);
    let api = match asked(&hello, limits, account) {
        Ok(api) => api,
        Err(why) => {
            caller.refuse(&why)?;
            bail!("{}: {why}", hello.name);
        }
    };
    let doorbell = caller.doorbell();
    let link = caller.accept(limits)?;
    // The driver is loaded with its devices, and nothing that the client sent was carried out yet.
    if wall.is_some() && api.is_of_processors() {
        wall::limits::addresses().context("limits")?;
    }
    wall::calls::filter(Again::inside(link.window.mapping()), doorbell)?;
    let session = Session::new(link, bucket, figures);
    api.attach(&session).context("standard output")?;
    match session.run(api.api()) {
        Error::Closed => {}
        why => say!("tombolo accel: client {}: {why}", hello.name),
    }
    // The process ends here; the kernel takes back its memory and devices. Running the driver's own exit handlers with
    // threads still inside of it would only risk a hang.
    // SAFETY: ends the process.
    unsafe { libc::_exit(0) }
}

/// Sets the niceness of this process's session, which counts in place of its threads' where the kernel groups them by session (sched_autogroup).
fn share_by_session(nice: i32) {
    // An ordinary user may set one every tenth of a second; another worker may have started just now.
    for _ in 0..20 {
        match std::fs::write("/proc/self/autogroup", nice.to_string()) {
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {
                std::thread::sleep(Duration::from_millis(100))
            }
            // There is no such file where the kernel knows no such groups.
            _ => return,
        }
    }
}

/// A driver for one client.
trait Driver {
    /// Ties it to its client.
    fn attach(&self, session: &Arc<Session>) -> std::io::Result<()>;
    /// Returns whether its devices are the host's processors: then its kernels run in this process.
    fn is_of_processors(&self) -> bool;
    fn api(&self) -> Arc<dyn Api>;
}

impl Driver for &'static OpenCl {
    fn attach(&self, session: &Arc<Session>) -> std::io::Result<()> {
        OpenCl::attach(self, session);
        self.capture_output()
    }

    fn is_of_processors(&self) -> bool {
        self.devices().iter().all(|device| device.is_processor)
    }

    fn api(&self) -> Arc<dyn Api> {
        Arc::new(*self)
    }
}

impl Driver for &'static Cuda {
    fn attach(&self, session: &Arc<Session>) -> std::io::Result<()> {
        Cuda::attach(self, session);
        self.capture_output()
    }

    /// A driver of GPUs reserves far more addresses than it has memory.
    fn is_of_processors(&self) -> bool {
        false
    }

    fn api(&self) -> Arc<dyn Api> {
        Arc::new(*self)
    }
}

/// Returns why a client can't be served: it asks for an API that there is none of, or was built from other declarations.
pub fn understands(hello: &Hello) -> Result<(), Error> {
    if hello.api == cuda::API {
        return hello.fits(cuda::API, cuda::IDENTITY);
    }
    hello.fits(opencl::API, opencl::IDENTITY)
}

/// Loads the driver of the API that a client asks for.
fn asked(hello: &Hello, limits: &Limits, account: Option<Arc<Account>>) -> Result<Box<dyn Driver>, String> {
    understands(hello).map_err(|why| why.to_string())?;
    let limits = limits.clone();
    if hello.api == cuda::API {
        let cuda = Cuda::load(limits, account).map_err(|e| format!("the server can't load CUDA: {e}"))?;
        return Ok(Box::new(cuda));
    }
    let opencl = OpenCl::load(limits, account).map_err(|e| format!("the server can't load OpenCL: {e}"))?;
    Ok(Box::new(opencl))
}

/// Clients share the compiled kernels there, which only clients that trust each other should. A confined worker does not see it.
fn shared_cache() -> Option<PathBuf> {
    std::env::var_os("POCL_CACHE_DIR").map(PathBuf::from)
}

/// The folder for the driver of a process without a file system of its own; `None`: the user named one that stays.
pub fn scratch() -> anyhow::Result<Option<TempDir>> {
    let made = || {
        tempfile::Builder::new()
            .prefix("tombolo-scratch-")
            .permissions(Permissions::from_mode(0o700))
            .tempdir()
    };
    shared_cache().is_none().then(made).transpose().context("a folder for the driver's temporary files")
}

/// Lets this process's libraries write there. For a process that has one thread.
fn announce(scratch: &Path, names: &[&str]) {
    for name in names {
        // SAFETY: this process has one thread yet.
        unsafe { std::env::set_var(name, scratch) };
    }
}

/// Gives up what this worker doesn't need, as far as its supervisor says. `scratch`: the folder of one without a file system of its own. For a process
/// that has one thread.
fn enter(wall: Option<&Behind>, scratch: Option<PathBuf>) -> anyhow::Result<()> {
    let Some(Behind { wall, executions }) = wall else {
        wall::enter_unconfined()?;
        let folder = scratch.or_else(shared_cache).context("no folder for the driver's files was named")?;
        announce(&folder, &["POCL_CACHE_DIR", "TMPDIR"]);
        return Ok(());
    };
    // By the host's, with which it began, the node's owner could change its mode for all users.
    let null = wall.enter()?;
    rustix::stdio::dup2_stdin(&null).context("standard input")?;
    rustix::stdio::dup2_stdout(&null).context("standard output")?;
    if let Some(number) = executions {
        // SAFETY: the supervisor put it there; this is its only owner.
        wall::exec::ask(unsafe { OwnedFd::from_raw_fd(*number) }).context("executions")?;
    }
    // There is no other folder.
    announce(&wall::scratch(), &["POCL_CACHE_DIR", "TMPDIR", "HOME", "XDG_CACHE_HOME"]);
    Ok(())
}

/// Tries whether a worker can be confined so, and prints the reason if it can't.
pub fn trial(wall: &Behind) -> ExitCode {
    match enter(Some(wall), None).and_then(|()| wall::calls::filter(Again::inside(0..0), None)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            say!("{e:#}");
            ExitCode::FAILURE
        }
    }
}

fn cuda_devices() -> Result<Vec<Device>, String> {
    let found = Cuda::load(Limits::default(), None)?.devices();
    found.map_err(|code| format!("no name of a CUDA device was told (code {code})"))
}

/// The devices of this machine, of one API or of both, as a worker has them. For a process that has one thread yet and ends soon.
pub fn devices(api: Option<&str>) -> anyhow::Result<Vec<Device>> {
    let scratch = scratch()?;
    let folder = scratch.as_ref().map(|own| own.path().to_owned()).or_else(shared_cache);
    announce(&folder.unwrap_or_default(), &["POCL_CACHE_DIR", "TMPDIR"]);
    // SAFETY: this process has one thread yet.
    unsafe { std::env::set_var(NATIVE, "1") };
    let (mut found, mut missing) = (Vec::new(), Vec::new());
    if api != Some("cuda") {
        match OpenCl::load(Limits::default(), None).map(|cl| cl.devices()) {
            Ok(devices) if devices.is_empty() => missing.push(
                "no OpenCL device on this machine; install a driver (Debian: pocl-opencl-icd for the CPU, or your device's) and look with clinfo".into(),
            ),
            Ok(devices) => found.extend(devices),
            Err(why) => missing.push(why),
        }
    }
    if api != Some("opencl") {
        match cuda_devices() {
            Ok(devices) => found.extend(devices),
            Err(why) => missing.push(format!("no CUDA device on this machine; {why}")),
        }
    }
    drop(scratch);
    if found.is_empty() {
        bail!("{}", missing.join("; "));
    }
    Ok(found)
}

fn is_unix(socket: &OwnedFd) -> anyhow::Result<bool> {
    let mut domain: libc::c_int = 0;
    let mut len = size_of_val(&domain) as libc::socklen_t;
    // SAFETY: room for an int, as its size says.
    let r = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_DOMAIN,
            (&raw mut domain).cast(),
            &mut len,
        )
    };
    if r < 0 {
        return Err(std::io::Error::last_os_error()).context("SO_DOMAIN");
    }
    Ok(domain == libc::AF_UNIX)
}
