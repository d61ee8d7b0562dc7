// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo noise`: what interrupts programs on this host or in a VM. In a VM the collector runs through the guest agent, while this host's kernel
//! records what holds up the threads of the vCPUs.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, ensure};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use tombolo_noise::cli::{Options, show};
use tombolo_noise::clock::GuestClock;
use tombolo_noise::recording::{self, Recording};
use tombolo_noise::report::Below;
use tombolo_noise::run::{self, COLLECTOR, Collector, NO_PATCHING};
use tombolo_noise::timeline;
use tombolo_qemu::hypervisor::follows_patched_code;

use crate::commands::carried::Carried;
use crate::commands::cli::File;
use crate::commands::client;
use crate::compose::Project;
use crate::project::control::Event;
use crate::qemu::Hypervisor;
use crate::qemu::version::Qemu;

/// The target that names this host.
const HOST: &str = "host";
/// Why the clocks of an emulated VM are not joined.
const EMULATED: &str = "the VM is emulated, and only KVM tells a guest's TSC offset, so what the host did is not joined with the guest's gaps; \
                        use KVM where this host has it";
/// The longest output of a guest's collector.
const LONGEST: usize = 256 << 20;

/// Options of `tombolo noise`.
#[derive(clap::Args, Debug)]
pub struct NoiseOptions {
    /// Which compose file
    #[command(flatten)]
    file: File,
    /// 'host', or a running VM of the compose file
    target: String,
    /// The measurement and its output
    #[command(flatten)]
    options: Options,
}

/// Measures and prints.
///
/// # Errors
/// Something is missing; the error names the remedy.
pub fn run(options: &NoiseOptions, json: bool) -> anyhow::Result<ExitCode> {
    let NoiseOptions { file, target, options } = options;
    let before = options.before()?;
    let (recording, below) = if target == HOST {
        (run::host(&options.measurement)?, Below::default())
    } else {
        vm(&file.identify()?, target, options)?
    };
    show(target, options, before.as_ref(), &recording, &below, json)?;
    Ok(ExitCode::SUCCESS)
}

/// Measures in a VM's guest, and records on this host meanwhile.
fn vm(project: &Project, name: &str, options: &Options) -> anyhow::Result<(Recording, Below)> {
    let status = client::status(project)?;
    let vm = status.vms.iter().find(|vm| vm.name == name);
    let vm = vm.with_context(|| format!("the project '{}' runs no VM '{name}'", project.name))?;
    let pid = vm.pid.with_context(|| format!("the VM '{name}' does not run ({})", vm.state))?;
    let threads = vcpu_threads(Path::new("/proc"), pid)?;
    let watch = Collector::watch(&host_cpus(Path::new("/proc"), pid, &threads)?)?;
    let mut arguments = options.measurement.arguments();
    let stale = stale_code(vm.hypervisor, vm.cpus, || Ok(Qemu::find(Some(&program(pid)))?.version));
    arguments.extend(stale.is_some().then(|| NO_PATCHING.to_owned()));
    let clocks = clocks(pid, vm.hypervisor, &threads);
    let guest = guest(project, name, &arguments);
    let host = watch.stop()?;
    let ends = self::clocks(pid, vm.hypervisor, &threads);
    let steady = clocks.into_iter().zip(ends).map(|(begin, end)| begin?.unchanged(end?)).collect();
    let mut below = below(steady, &threads, &host);
    let guest = guest?;
    below.notes.extend(stale.filter(|_| guest.traced.is_empty()));
    Ok((guest, below))
}

/// The program that a process runs, also where its file has been replaced.
fn program(pid: u32) -> PathBuf {
    format!("/proc/{pid}/exe").into()
}

/// Returns why the guest's kernel must not patch its code, if it must not. A QEMU that does not tell its version is taken for an old one.
fn stale_code(
    hypervisor: Hypervisor,
    cpus: u32,
    version: impl FnOnce() -> anyhow::Result<(u32, u32, u32)>,
) -> Option<String> {
    if hypervisor == Hypervisor::Kvm || cpus < 2 {
        return None;
    }
    let qemu = match version() {
        Ok(version) if follows_patched_code(version) => return None,
        Ok((major, minor, micro)) => format!("QEMU {major}.{minor}.{micro}"),
        Err(_) => "a QEMU that does not tell its version".to_owned(),
    };
    Some(format!(
        "{qemu} emulates this VM: before 8.1 a CPU may execute code that another one has patched, as it was meanwhile, and the guest's kernel \
         dies of that; give the kernel the arguments above ('cmdline' in the compose file), or use QEMU 8.1"
    ))
}

/// The threads of a QEMU's vCPUs in the guest's order, by the names that QEMU gives them.
fn vcpu_threads(proc: &Path, pid: u32) -> anyhow::Result<Vec<(u32, u32)>> {
    let folder = proc.join(pid.to_string()).join("task");
    let tasks = std::fs::read_dir(&folder).with_context(|| format!("{} can't be read", folder.display()))?;
    let of = |task: std::fs::DirEntry| {
        let name = std::fs::read_to_string(task.path().join("comm")).ok()?;
        let vcpu = name.strip_prefix("CPU ")?.split('/').next()?.parse().ok()?;
        Some((vcpu, task.file_name().to_str()?.parse().ok()?))
    };
    let mut threads: Vec<(u32, u32)> = tasks.flatten().filter_map(of).collect();
    threads.sort_unstable();
    ensure!(!threads.is_empty(), "QEMU, process {pid}, has no thread whose name is that of a vCPU");
    Ok(threads)
}

/// The host CPUs on which these threads may run, as a list.
fn host_cpus(proc: &Path, pid: u32, threads: &[(u32, u32)]) -> anyhow::Result<String> {
    let mut lists = Vec::new();
    for (_, thread) in threads {
        let path = proc.join(format!("{pid}/task/{thread}/status"));
        let status =
            std::fs::read_to_string(&path).with_context(|| format!("{} can't be read", path.display()))?;
        let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
        lists.push(list.with_context(|| format!("{} names no CPUs", path.display()))?.trim().to_owned());
    }
    lists.sort();
    lists.dedup();
    Ok(lists.join(","))
}

/// The clocks of a VM's vCPUs, in the order of their threads.
fn clocks(pid: u32, hypervisor: Hypervisor, threads: &[(u32, u32)]) -> Vec<anyhow::Result<GuestClock>> {
    let clock = |(vcpu, _): &(u32, u32)| match hypervisor {
        Hypervisor::Kvm => GuestClock::of(pid, *vcpu),
        Hypervisor::Tcg => Err(anyhow::anyhow!("{EMULATED}")),
    };
    threads.iter().map(clock).collect()
}

/// Returns the host's records of the vCPUs' threads, by the guest's clock where that is known.
fn below(clocks: Vec<anyhow::Result<GuestClock>>, threads: &[(u32, u32)], host: &Recording) -> Below {
    let mut below = Below { hz: host.hz, ..Below::default() };
    below.notes.extend(host.notes.iter().map(|note| format!("on the host: {note}")));
    if host.lost > 0 {
        below.notes.push(format!("on the host: {} events did not fit; lower --seconds", host.lost));
    }
    if host.trace.is_empty() {
        return below;
    }
    let moments = || host.trace.values().flatten().map(|event| event.at);
    let length = moments().max().unwrap_or(0) - moments().min().unwrap_or(0);
    let mut unknown = None;
    for (((_, thread), clock), cpu) in threads.iter().zip(clocks).zip(0..) {
        let timeline = timeline::of_thread(&host.trace, *thread);
        match clock {
            Ok(clock) => {
                below.joined.insert(cpu, clock.joined(&timeline));
            }
            Err(e) => {
                unknown = Some(format!("{e:#}"));
                below.apart.push((timeline, length));
            }
        }
    }
    below.notes.extend(unknown);
    below
}

/// Runs the collector in a guest through its agent.
fn guest(project: &Project, vm: &str, arguments: &[String]) -> anyhow::Result<Recording> {
    let collector = Carried { name: "tombolo-noise", bytes: COLLECTOR };
    let mut peer = client::living(project, &collector.request(vm, arguments, Vec::new()))?;
    let socket = peer.socket();
    // The input stays open, since the collector stops when it ends.
    collector.send_meanwhile(Arc::clone(&socket))?;
    let (mut out, mut err, mut code) = (Vec::new(), Vec::new(), None);
    loop {
        match peer.receive::<Event>()? {
            Some(Event::Out { data }) => out.extend(BASE64.decode(data)?),
            Some(Event::Err { data }) => err.extend(BASE64.decode(data)?),
            Some(Event::Exit { code: ended }) => code = Some(ended),
            Some(Event::Done) => break,
            Some(Event::Failed { message }) => anyhow::bail!("{message}"),
            Some(_) => {}
            None => anyhow::bail!("the supervisor ended while the guest was measured"),
        }
        ensure!(out.len().max(err.len()) <= LONGEST, "the guest of '{vm}' does not stop writing");
    }
    if code != Some(0) {
        let said = String::from_utf8_lossy(&err);
        let said: String = said.trim().chars().filter(|c| !c.is_control() || *c == '\n').collect();
        anyhow::bail!("the guest of '{vm}' can't be measured: {said}");
    }
    recording::parse(&out).with_context(|| format!("what the guest of '{vm}' wrote can't be read"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vcpus_are_found_by_their_threads_names_and_their_cpus_are_joined() {
        let proc = tempfile::tempdir().unwrap();
        let threads =
            [(70, "qemu", "0-3"), (74, "CPU 10/KVM", "6"), (72, "CPU 2/KVM", "5"), (71, "CPU x", "4")];
        for (thread, name, cpus) in threads {
            let folder = proc.path().join(format!("70/task/{thread}"));
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(folder.join("comm"), format!("{name}\n")).unwrap();
            std::fs::write(folder.join("status"), format!("Name:\tx\nCpus_allowed_list:\t{cpus}\n")).unwrap();
        }
        let found = vcpu_threads(proc.path(), 70).unwrap();
        assert_eq!(found, [(2, 72), (10, 74)]);
        assert_eq!(host_cpus(proc.path(), 70, &found).unwrap(), "5,6");
        let error = vcpu_threads(proc.path(), 71).unwrap_err().to_string();
        assert!(error.contains("71/task can't be read"), "{error}");
    }

    #[test]
    fn only_an_old_emulation_of_several_cpus_keeps_the_guests_kernel_from_patching() {
        let stale = |hypervisor, cpus, version| stale_code(hypervisor, cpus, || Ok(version));
        let why = stale(Hypervisor::Tcg, 2, (7, 2, 22)).unwrap();
        assert!(why.starts_with("QEMU 7.2.22 emulates this VM"), "{why}");
        assert_eq!(stale(Hypervisor::Tcg, 2, (8, 1, 0)), None);
        assert_eq!(stale(Hypervisor::Tcg, 1, (7, 2, 22)), None);
        assert_eq!(stale(Hypervisor::Kvm, 2, (7, 2, 22)), None);
        assert!(stale_code(Hypervisor::Tcg, 2, || anyhow::bail!("it is gone")).is_some());
    }
}
