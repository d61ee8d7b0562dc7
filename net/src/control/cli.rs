// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo net`: runs a switch, and inspects a running one.

use std::io::{self, IsTerminal, Read, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use clap::Subcommand;
use rustix::process::{Resource, Rlimit};
use tombolo_control::Mac;
use tombolo_control::net::{Done, Flow, Ports};

use crate::control::config::{Config, PortConfig, UplinkConfig, Way};
use crate::control::daemon::Daemon;
use crate::control::log;
use crate::control::socket::{Request, ask};

/// The default control socket of a switch.
const CONTROL: &str = "/run/tombolo/net.sock";

/// Commands for switches.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run a switch until SIGINT or SIGTERM
    Run {
        /// Configuration file
        #[arg(short, long)]
        config: Option<PathBuf>,
        /// A port in short: NAME,SOCKET,MAC[,MAC…]
        #[arg(long, value_name = "PORT", value_parser = short_port)]
        port: Vec<PortConfig>,
        /// An uplink in short: tap=NAME, interface=NAME, passt=SOCKET, or user=passt, which starts a passt for each port
        #[arg(long, value_name = "WAY", value_parser = short_way)]
        uplink: Vec<Way>,
        /// Control socket
        #[arg(long)]
        control: Option<PathBuf>,
        /// Address for Prometheus, such as 127.0.0.1:9127, or a Unix socket's absolute path
        #[arg(long)]
        metrics: Option<tombolo_metrics::Place>,
        /// Worker threads
        #[arg(long)]
        workers: Option<usize>,
        /// Processors for them, one each
        #[arg(long, value_delimiter = ',')]
        cpus: Vec<usize>,
        /// Microseconds for which an idle worker keeps polling
        #[arg(long)]
        poll_us: Option<u64>,
        /// Processor time that all of them together may use, in hundredths of a processor
        #[arg(long, value_name = "PERCENT")]
        budget: Option<u32>,
        /// Owner of the ports' sockets, by name or number
        #[arg(long)]
        owner: Option<String>,
        /// Their group [default for root: the group of libvirt's QEMU, where there is one]
        #[arg(long)]
        group: Option<String>,
        /// Their mode, such as 0660
        #[arg(long)]
        mode: Option<String>,
        /// User as which a switch that root starts runs [default: tombolo, or nobody]
        #[arg(long)]
        user: Option<String>,
        /// Keep all privileges
        #[arg(long)]
        no_sandbox: bool,
    },
    /// List the ports with their MACs and counters
    Ports {
        /// Control socket of the switch, or the name of a running project's network [default: the project's, or
        /// /run/tombolo/net.sock]
        #[arg(long)]
        control: Option<PathBuf>,
    },
    /// Write a port's frames as pcapng, to a file or to a pipe into Wireshark
    Capture {
        /// The port
        port: String,
        /// File; otherwise standard output
        #[arg(short, long)]
        write: Option<PathBuf>,
        /// Bytes to keep of each frame
        #[arg(short, long, default_value_t = 65600)]
        snap: u32,
        /// End after so many seconds
        #[arg(long)]
        seconds: Option<u64>,
        /// Control socket of the switch, or the name of a running project's network [default: the project's, or
        /// /run/tombolo/net.sock]
        #[arg(long)]
        control: Option<PathBuf>,
    },
    /// Add a port to a running switch: NAME,SOCKET,MAC[,MAC…]
    Add {
        /// The port
        #[arg(value_parser = short_port)]
        port: PortConfig,
        /// Control socket of the switch, or the name of a running project's network [default: the project's, or
        /// /run/tombolo/net.sock]
        #[arg(long)]
        control: Option<PathBuf>,
    },
    /// Add an uplink to a running switch
    AddUplink {
        /// Its name
        name: String,
        /// Its device: tap=NAME, interface=NAME, user=passt or passt=SOCKET
        #[arg(value_parser = short_way)]
        way: Way,
        /// The only port that it serves; passt serves one
        #[arg(long)]
        port: Option<String>,
        /// Control socket of the switch, or the name of a running project's network [default: the project's, or
        /// /run/tombolo/net.sock]
        #[arg(long)]
        control: Option<PathBuf>,
    },
    /// Remove a port or an uplink from a running switch
    Remove {
        /// Its name
        port: String,
        /// Control socket of the switch, or the name of a running project's network [default: the project's, or
        /// /run/tombolo/net.sock]
        #[arg(long)]
        control: Option<PathBuf>,
    },
}

impl Command {
    /// Returns the switch that a command asks; `None` for commands that ask none.
    pub fn control_mut(&mut self) -> Option<&mut Option<PathBuf>> {
        match self {
            Self::Ports { control }
            | Self::Capture { control, .. }
            | Self::Add { control, .. }
            | Self::AddUplink { control, .. }
            | Self::Remove { control, .. } => Some(control),
            Self::Run { .. } => None,
        }
    }
}

/// Returns the control socket, by default [`CONTROL`].
fn socket(control: Option<PathBuf>) -> PathBuf {
    control.unwrap_or_else(|| CONTROL.into())
}

fn short_port(text: &str) -> Result<PortConfig, String> {
    let parts: Vec<&str> = text.split(',').collect();
    let [name, socket, macs @ ..] = &parts[..] else {
        return Err("a port is NAME,SOCKET,MAC[,MAC…]".into());
    };
    let port = serde_json::json!({ "name": name, "socket": socket, "macs": macs });
    serde_json::from_value(port).map_err(|err| err.to_string())
}

fn short_way(text: &str) -> Result<Way, String> {
    let (kind, value) =
        text.split_once('=').ok_or("an uplink is tap=NAME, interface=NAME, user=passt or passt=SOCKET")?;
    serde_json::from_value(serde_json::json!({ kind: value })).map_err(|err| err.to_string())
}

/// Runs `command`; with `json`, answers are JSON.
///
/// # Errors
/// The failed operation, its place and the remedy.
pub fn run(command: Command, json: bool) -> anyhow::Result<ExitCode> {
    match command {
        Command::Run {
            config,
            port,
            uplink,
            control,
            metrics,
            workers,
            cpus,
            poll_us,
            budget,
            owner,
            group,
            mode,
            user,
            no_sandbox,
        } => {
            let mut all = config.as_deref().map(read).transpose()?.unwrap_or_default();
            all.port.extend(port);
            for way in uplink {
                add_uplinks(&mut all, &way);
            }
            let s = &mut all.switch;
            s.control = control.or_else(|| s.control.take());
            s.metrics = metrics.or_else(|| s.metrics.take());
            s.workers = workers.unwrap_or(s.workers);
            s.poll_us = poll_us.unwrap_or(s.poll_us);
            s.budget = budget.unwrap_or(s.budget);
            s.sandbox &= !no_sandbox;
            s.access.owner = owner.or_else(|| s.access.owner.take());
            s.access.group = group.or_else(|| s.access.group.take());
            s.access.mode = mode.or_else(|| s.access.mode.take());
            s.user = user.or_else(|| s.user.take());
            if !cpus.is_empty() {
                s.cpus = cpus;
            }
            serve(&all)
        }
        Command::Ports { control } => {
            let (answer, _) = ask::<Ports>(&socket(control), &Request::Ports)?;
            if json { print(&serde_json::to_string(&answer)?) } else { print(&table(&answer)) }
        }
        Command::Capture { port, write, snap, seconds, control } => {
            capture(&socket(control), port, write.as_deref(), snap, seconds)
        }
        Command::Add { port, control } => change(control, &Request::Add { port }),
        Command::AddUplink { name, way, port, control } => {
            let uplink = UplinkConfig { port, ..UplinkConfig::new(name, way) };
            change(control, &Request::AddUplink { uplink })
        }
        Command::Remove { port, control } => change(control, &Request::Remove { name: port }),
    }
}

fn read(config: &Path) -> anyhow::Result<Config> {
    let text = std::fs::read_to_string(config).with_context(|| config.display().to_string())?;
    toml::from_str(&text).with_context(|| config.display().to_string())
}

/// Has the switch at this control socket change its ports.
fn change(control: Option<PathBuf>, request: &Request) -> anyhow::Result<ExitCode> {
    ask::<Done>(&socket(control), request)?;
    Ok(ExitCode::SUCCESS)
}

/// Adds an uplink, or one for each port if its device serves one only.
fn add_uplinks(config: &mut Config, way: &Way) {
    let mut ports: Vec<_> = config.port.iter().map(|port| Some(port.name.clone())).collect();
    if ports.len() < 2 || !matches!(way, Way::User(_)) {
        ports = vec![None];
    }
    for port in ports {
        let name = format!("uplink{}", config.uplink.len());
        config.uplink.push(UplinkConfig { port, ..UplinkConfig::new(name, way.clone()) });
    }
}

fn print(text: &str) -> anyhow::Result<ExitCode> {
    writeln!(io::stdout(), "{}", text.trim_end())?;
    Ok(ExitCode::SUCCESS)
}

/// Returns `limit` with as many descriptors as it allows. The kernel refuses a limit above `most`, its own (fs.nr_open), even if it had
/// been set when that was higher.
fn descriptors(limit: Rlimit, most: Option<u64>) -> Rlimit {
    let maximum = match (limit.maximum, most) {
        (Some(hard), Some(most)) => Some(hard.min(most)),
        (None, most) => most,
        (hard, None) => hard,
    };
    Rlimit { current: maximum, maximum }
}

/// Runs a switch until a signal comes.
fn serve(config: &Config) -> anyhow::Result<ExitCode> {
    anyhow::ensure!(
        !config.port.is_empty() || config.switch.control.is_some(),
        "no port is configured, and no control socket to add one; see 'tombolo net run --help'"
    );
    log::open();
    // Each port's front-end passes up to a hundred descriptors.
    let most = std::fs::read_to_string("/proc/sys/fs/nr_open").ok().and_then(|text| text.trim().parse().ok());
    let limit = descriptors(rustix::process::getrlimit(Resource::Nofile), most);
    rustix::process::setrlimit(Resource::Nofile, limit)
        .with_context(|| format!("the limit of open files can't be set to {:?}", limit.current))?;
    // Blocked before any thread starts, so that only sigwait receives them.
    // SAFETY: a local set, filled by the calls that are made for that.
    let signals = unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        libc::sigaddset(&mut set, libc::SIGINT);
        libc::sigaddset(&mut set, libc::SIGTERM);
        libc::pthread_sigmask(libc::SIG_BLOCK, &set, std::ptr::null_mut());
        set
    };
    let daemon = Daemon::start(config)?;
    let mut signal = 0;
    // SAFETY: both are ours.
    unsafe { libc::sigwait(&signals, &mut signal) };
    tracing::info!(signal, "ending");
    daemon.stop();
    log::finish();
    Ok(ExitCode::SUCCESS)
}

fn capture(
    control: &Path,
    port: String,
    file: Option<&Path>,
    snap: u32,
    seconds: Option<u64>,
) -> anyhow::Result<ExitCode> {
    let mut out: Box<dyn Write> = match file {
        Some(path) => Box::new(std::fs::File::create(path).with_context(|| path.display().to_string())?),
        None => {
            anyhow::ensure!(
                !io::stdout().is_terminal(),
                "frames don't suit a terminal; use --write FILE, or pipe into 'wireshark -k -i -'"
            );
            Box::new(io::stdout())
        }
    };
    let (_, mut reader) = ask::<Done>(control, &Request::Capture { name: port, snap })?;
    let stream = reader.get_ref().try_clone()?;
    if let Some(seconds) = seconds {
        std::thread::spawn(move || {
            std::thread::sleep(std::time::Duration::from_secs(seconds));
            // The switch then completes the file and closes.
            let _gone = stream.shutdown(std::net::Shutdown::Write);
        });
    }
    let mut buffer = vec![0; 1 << 16];
    loop {
        let n = reader.read(&mut buffer)?;
        if n == 0 {
            return Ok(ExitCode::SUCCESS);
        }
        match out.write_all(&buffer[..n]).and_then(|()| out.flush()) {
            Err(err) if err.kind() == io::ErrorKind::BrokenPipe => return Ok(ExitCode::SUCCESS),
            other => other?,
        }
    }
}

fn or_dash(all: &[String]) -> String {
    if all.is_empty() { "-".into() } else { all.join(",") }
}

/// Formats the ports as a table.
fn table(answer: &Ports) -> String {
    let mut rows =
        vec![["PORT", "STATE", "MACS", "GROUPS", "SENT", "DROPPED", "RECEIVED", "DROPPED"].map(String::from)];
    for p in &answer.ports {
        let macs: Vec<String> = p.macs.iter().map(Mac::to_string).collect();
        let drops = |f: &Flow| {
            let all: Vec<_> = f.drops.iter().map(|(reason, n)| format!("{reason}:{n}")).collect();
            if all.is_empty() { "0".into() } else { all.join(",") }
        };
        rows.push([
            p.name.clone(),
            p.state().into(),
            or_dash(&macs),
            or_dash(&p.groups),
            p.sent.packets.to_string(),
            drops(&p.sent),
            p.received.packets.to_string(),
            drops(&p.received),
        ]);
    }
    columns(&rows, |_| false)
}

/// Aligns rows in columns; those that `right` selects to the right.
pub(crate) fn columns<const N: usize>(rows: &[[String; N]], right: impl Fn(usize) -> bool) -> String {
    let mut widths = [0; N];
    for row in rows {
        for (w, cell) in widths.iter_mut().zip(row) {
            *w = (*w).max(cell.chars().count());
        }
    }
    let mut text = String::new();
    for row in rows {
        let cells = row.iter().zip(widths).enumerate();
        let cells: Vec<_> =
            cells.map(|(i, (c, w))| if right(i) { format!("{c:>w$}") } else { format!("{c:w$}") }).collect();
        text.push_str(cells.join("  ").trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_of_open_files_above_the_kernels_own_is_lowered_to_that() {
        let raised = |soft, hard, most| {
            let limit = descriptors(Rlimit { current: soft, maximum: hard }, most);
            assert_eq!(limit.current, limit.maximum);
            limit.current
        };
        assert_eq!(raised(Some(1024), Some(4096), Some(1 << 20)), Some(4096));
        assert_eq!(raised(Some(1024), Some(1 << 20), Some(4096)), Some(4096));
        assert_eq!(raised(Some(1024), None, Some(4096)), Some(4096));
        assert_eq!(raised(Some(1024), Some(4096), None), Some(4096));
    }
}
