// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A buffer of trace events of its own (tracefs, `instances/`), which leaves other tracing as it is. Its name has the process that made it,
//! so that the next run removes the buffer of a killed one.

use std::fs;
use std::io::{BufRead, BufReader, ErrorKind};
use std::path::{Path, PathBuf};

use crate::{quanta, system};

/// Where tracefs is mounted, by kernels and by older systems.
const PLACES: [&str; 2] = ["/sys/kernel/tracing", "/sys/kernel/debug/tracing"];
/// Begins the names of this program's instances.
const PREFIX: &str = "tombolo-noise-";
/// The clock of all instances: the time-stamp counter, which the measuring loop reads too.
const CLOCK: &str = "x86-tsc";
/// Kilobytes of the buffer of each CPU.
const BUFFER_KB: u32 = 8192;
/// The event that the cost of an event is measured by: a page that is touched first raises one.
const COSTED: &str = "exceptions/page_fault_user";
/// Pages touched in one round of that measurement, few enough that some rounds are not interrupted on a busy machine; rounds in a turn; and turns,
/// each without and with the event.
const PAGES: usize = 32;
const ROUNDS: usize = 32;
const TURNS: usize = 8;

/// Trace events that show a CPU taken from a program, by group. A group without a list records all of its events.
const EVENTS: [(&str, &[&str]); 6] = [
    ("sched", &["sched_switch"]),
    ("irq", &["irq_handler_entry", "irq_handler_exit", "softirq_entry", "softirq_exit"]),
    ("irq_vectors", &[]),
    ("nmi", &["nmi_handler"]),
    ("exceptions", &["page_fault_user", "page_fault_kernel"]),
    ("kvm", &["kvm_exit", "kvm_entry", "kvm_async_pf_not_present", "kvm_async_pf_ready"]),
];
/// Groups that come with a module or a kind of hardware, and are no loss where they are not.
const OPTIONAL: [&str; 2] = ["nmi", "kvm"];
/// The one of them that comes with a module, which is loaded after the boot.
const MODULE: &str = "kvm";
/// The buffers in which an event must be switched on so that one more changes no code: see [`check_residents`].
const RESIDENTS: usize = 2;
/// Events of a group without a list that are no interrupts.
const NOT_INTERRUPTS: &str = "vector_";

/// The root of tracefs. Where it is not mounted, it is mounted for this process alone.
///
/// # Errors
/// The missing capability or file, and the remedy.
pub fn find() -> Result<PathBuf, String> {
    for place in PLACES.map(Path::new) {
        match fs::read_dir(place.join("instances")) {
            Ok(_) => return Ok(place.to_owned()),
            Err(e) if e.kind() == ErrorKind::PermissionDenied => return Err(privilege(place, &e)),
            Err(_) => {}
        }
    }
    let kinds = fs::read_to_string("/proc/filesystems").unwrap_or_default();
    if !kinds.lines().any(|line| line.ends_with("\ttracefs")) {
        return Err(
            "this kernel has no tracefs, so no cause can be named; boot one that is built with CONFIG_FTRACE"
                .into(),
        );
    }
    let place = Path::new(PLACES[0]);
    match system::mount_tracefs_for_itself(c"/sys/kernel/tracing") {
        Ok(()) => Ok(place.to_owned()),
        Err(e) => Err(format!(
            "tracefs is not mounted, so no cause can be named ({e}); run it as root (CAP_SYS_ADMIN), or mount it: \
             mount -t tracefs nodev {}",
            place.display()
        )),
    }
}

fn privilege(place: &Path, error: &std::io::Error) -> String {
    format!(
        "{} can't be used, so no cause can be named ({error}); run it as root (CAP_DAC_OVERRIDE for the files of tracefs)",
        place.display()
    )
}

/// A buffer of trace events. It is removed when it is dropped.
pub struct Instance {
    folder: PathBuf,
    missing: Vec<String>,
    events: Vec<PathBuf>,
}

impl Instance {
    /// Makes a buffer for the events of these CPUs, and removes those that dead processes have left. Nothing is recorded yet.
    /// Without `patching`, the events are switched on and off with no change of the kernel's code.
    ///
    /// # Errors
    /// The kernel refuses it; what it says is named. Without `patching`, also an event that the kernel would patch its code for.
    pub fn new(root: &Path, cpus: &[u32], patching: bool) -> Result<Self, String> {
        let instances = root.join("instances");
        if !patching {
            check_residents(root)?;
        }
        remove_stale(&instances, Path::new("/proc"));
        let own = std::process::id();
        let started = started(Path::new("/proc"), own).ok_or("/proc/self/stat can't be read")?;
        let folder = instances.join(format!("{PREFIX}{own}-{started}"));
        fs::create_dir(&folder).map_err(|e| privilege(root, &e))?;
        let mut instance = Self { folder, missing: Vec::new(), events: Vec::new() };
        instance.write("tracing_on", "0")?;
        instance.write("trace_clock", CLOCK)?;
        instance.write("tracing_cpumask", &mask(cpus))?;
        // Set first where the buffer is full: what is lost is then the end, and is counted.
        instance.write("options/overwrite", "0")?;
        instance.write("buffer_size_kb", &BUFFER_KB.to_string())?;
        (instance.events, instance.missing) = events(&instance.folder, patching);
        Ok(instance)
    }

    /// Events that this kernel does not have.
    pub fn missing(&self) -> impl Iterator<Item = &str> {
        self.missing.iter().map(String::as_str)
    }

    /// Begins or ends the recording of all events.
    ///
    /// # Errors
    /// The kernel refuses it.
    pub fn record(&mut self, on: bool) -> Result<(), String> {
        if on {
            for event in &self.events {
                put(event, "1")?;
            }
        }
        self.write("tracing_on", if on { "1" } else { "0" })
    }

    /// Ticks that the recording of one event costs: what touching a page takes longer while page faults are recorded. The buffer is empty then.
    ///
    /// # Errors
    /// The kernel refuses to switch the event.
    pub fn event_cost(&mut self, cpu: u32) -> Result<u64, String> {
        let event = self.folder.join("events").join(COSTED).join("enable");
        if !event.exists() {
            return Ok(0);
        }
        self.write("tracing_on", "1")?;
        let cost = std::thread::scope(|scope| {
            let measure = || -> Result<u64, String> {
                system::bind(&[cpu])?;
                system::small_pages().map_err(|e| format!("huge pages can't be switched off: {e}"))?;
                let (mut plain, mut traced) = (u64::MAX, u64::MAX);
                for _ in 0..TURNS {
                    put(&event, "0")?;
                    plain = plain.min(fastest()?);
                    put(&event, "1")?;
                    traced = traced.min(fastest()?);
                }
                put(&event, "0")?;
                Ok(traced.saturating_sub(plain) / PAGES as u64)
            };
            let failed = |_| Err("the calibration's thread has failed".to_string());
            scope.spawn(measure).join().unwrap_or_else(failed)
        })?;
        self.write("tracing_on", "0")?;
        self.write("trace", "")?;
        Ok(cost)
    }

    /// Events that did not fit.
    pub fn lost(&self) -> u64 {
        let folders = fs::read_dir(self.folder.join("per_cpu")).into_iter().flatten().flatten();
        let stats = folders.filter_map(|folder| fs::read_to_string(folder.path().join("stats")).ok());
        stats.map(|text| lost(&text)).sum()
    }

    /// The trace, as the kernel prints it.
    ///
    /// # Errors
    /// It can't be read.
    pub fn text(&self) -> Result<impl BufRead, String> {
        let path = self.folder.join("trace");
        let file = fs::File::open(&path).map_err(|e| format!("{} can't be read: {e}", path.display()))?;
        Ok(BufReader::with_capacity(1 << 20, file))
    }

    fn write(&self, name: &str, value: &str) -> Result<(), String> {
        put(&self.folder.join(name), value)
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        // The kernel keeps an instance that another process reads now; the next run removes it.
        let _ = fs::remove_dir(&self.folder);
    }
}

/// The switches of the events that are recorded, in a folder of tracefs that has `events`, and the names of those that this kernel does not have.
/// No buffer that is made during the boot has those of a module, so they are left out without `patching`.
fn events(folder: &Path, patching: bool) -> (Vec<PathBuf>, Vec<String>) {
    let (mut switches, mut missing) = (Vec::new(), Vec::new());
    for (group, names) in EVENTS.into_iter().filter(|(group, _)| patching || *group != MODULE) {
        let folder = folder.join("events").join(group);
        let there: Vec<String> = if names.is_empty() {
            let entries = fs::read_dir(&folder).into_iter().flatten().flatten();
            entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
        } else {
            names.iter().map(|name| (*name).to_owned()).collect()
        };
        for name in there.iter().filter(|name| !name.starts_with(NOT_INTERRUPTS)) {
            let switch = folder.join(name).join("enable");
            if switch.exists() {
                switches.push(switch);
            } else if !names.is_empty() && !OPTIONAL.contains(&group) {
                missing.push(format!("{group}:{name}"));
            }
        }
    }
    (switches, missing)
}

/// Checks that each event is switched on in [`RESIDENTS`] buffers that stay. The kernel calls an event's only probe directly, calls two or more
/// from a list, and skips an event that has none; it patches its code at each change between these three. A probe beyond two is an entry of the list.
///
/// # Errors
/// An event is switched on in fewer buffers.
fn check_residents(root: &Path) -> Result<(), String> {
    let entries = fs::read_dir(root.join("instances")).map_err(|e| privilege(root, &e))?;
    let stays = |folder: &PathBuf| {
        let name = folder.file_name().unwrap_or_default();
        !name.to_string_lossy().starts_with(PREFIX)
    };
    let instances: Vec<PathBuf> =
        entries.flatten().map(|entry| entry.path()).filter(stays).chain([root.to_owned()]).collect();
    let on = |folder: &Path, switch: &Path| {
        let own = switch.strip_prefix(root).is_ok_and(|switch| {
            fs::read_to_string(folder.join(switch)).is_ok_and(|state| state.starts_with('1'))
        });
        usize::from(own)
    };
    let (switches, _) = events(root, false);
    let patched = switches.iter().find(|switch| {
        let buffers: usize = instances.iter().map(|folder| on(folder, switch)).sum();
        buffers < RESIDENTS
    });
    patched.map_or(Ok(()), |switch| {
        let event = switch.parent().and_then(|event| event.strip_prefix(root.join("events")).ok());
        let event = event.unwrap_or(switch).display();
        Err(format!(
            "the kernel would patch its code to record {event}, so no cause can be named; boot it with {}",
            resident_arguments()
        ))
    })
}

/// The kernel's arguments that switch on all events in buffers that stay, before the second CPU starts. The buffers record nothing.
fn resident_arguments() -> String {
    let all = |(group, names): (&str, &[&str])| {
        if names.is_empty() {
            return vec![group.to_owned()];
        }
        names.iter().map(|name| format!("{group}:{name}")).collect()
    };
    let events: Vec<String> =
        EVENTS.into_iter().filter(|(group, _)| *group != MODULE).flat_map(all).collect();
    let one = |number| format!("trace_instance=resident-{number}^traceoff,{}", events.join(","));
    let list: Vec<String> = (1..=RESIDENTS).map(one).collect();
    list.join(" ")
}

fn put(path: &Path, value: &str) -> Result<(), String> {
    fs::write(path, value).map_err(|e| format!("{} can't be set to '{value}': {e}", path.display()))
}

/// The shortest time that a round of touching pages takes.
fn fastest() -> Result<u64, String> {
    let mut shortest = u64::MAX;
    for _ in 0..ROUNDS {
        let before = quanta::now();
        system::touch_new_pages(PAGES).map_err(|e| format!("no pages can be mapped: {e}"))?;
        shortest = shortest.min(quanta::now().saturating_sub(before));
    }
    Ok(shortest)
}

/// Lost events by a CPU's `stats`.
fn lost(stats: &str) -> u64 {
    let count = |name: &str| {
        let line = stats.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.and_then(|value| value.trim().parse::<u64>().ok()).unwrap_or(0)
    };
    count("overrun") + count("commit overrun") + count("dropped events")
}

/// A mask of CPUs as Linux writes it: groups of 32 bits, the highest first.
fn mask(cpus: &[u32]) -> String {
    let groups = cpus.iter().max().map_or(1, |cpu| cpu / 32 + 1);
    let bits = |group: u32| {
        let of = cpus.iter().filter(|cpu| *cpu / 32 == group);
        of.fold(0u32, |bits, cpu| bits | 1 << (cpu % 32))
    };
    let groups: Vec<String> = (0..groups).rev().map(|group| format!("{:08x}", bits(group))).collect();
    groups.join(",")
}

/// When a process was started, in the kernel's ticks since boot; with its number this names it for good.
fn started(proc: &Path, process: u32) -> Option<u64> {
    let stat = fs::read_to_string(proc.join(process.to_string()).join("stat")).ok()?;
    // The name in brackets may have spaces and brackets of its own.
    stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(19)?.parse().ok()
}

/// Removes the instances whose processes are gone.
fn remove_stale(instances: &Path, proc: &Path) {
    for entry in fs::read_dir(instances).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let of = name.to_str().and_then(|name| name.strip_prefix(PREFIX)?.split_once('-'));
        let Some((process, start)) = of.and_then(|(p, s)| Some((p.parse().ok()?, s.parse().ok()?))) else {
            continue;
        };
        if started(proc, process) != Some(start) {
            // Another run may have been faster.
            let _ = fs::remove_dir(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_are_written_as_linux_writes_them() {
        assert_eq!(mask(&[0, 3]), "00000009");
        assert_eq!(mask(&[1, 32, 64]), "00000001,00000001,00000002");
    }

    #[test]
    fn lost_events_are_counted_by_all_their_names() {
        let stats =
            "entries: 9\noverrun: 2\ncommit overrun: 1\nbytes: 5\ndropped events: 4\nread events: 0\n";
        assert_eq!(lost(stats), 7);
    }

    #[test]
    fn an_event_that_fewer_than_two_lasting_buffers_record_would_patch_the_kernel() {
        let root = std::env::temp_dir().join(format!("tombolo-noise-residents-{}", std::process::id()));
        let set = |buffer: &str, state: &str| {
            let folder = root.join(buffer).join("events/sched/sched_switch");
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join("enable"), state).unwrap();
        };
        set("", "0\n");
        set("instances/a", "1\n");
        set("instances/tombolo-noise-70-1234", "1\n");
        let refused = check_residents(&root).unwrap_err();
        set("instances/b", "1*\n");
        let kept = check_residents(&root);
        fs::remove_dir_all(&root).unwrap();
        assert!(refused.contains("patch its code to record sched/sched_switch"), "{refused}");
        let arguments = "trace_instance=resident-1^traceoff,sched:sched_switch,irq:irq_handler_entry,";
        assert!(refused.contains(arguments) && !refused.contains("kvm"), "{refused}");
        assert_eq!(kept, Ok(()));
    }

    #[test]
    fn only_the_instances_of_dead_processes_are_removed() {
        let folder = std::env::temp_dir().join(format!("tombolo-noise-test-{}", std::process::id()));
        let (instances, proc) = (folder.join("instances"), folder.join("proc"));
        fs::create_dir_all(proc.join("70")).unwrap();
        let fields = vec!["7"; 19].join(" ");
        fs::write(proc.join("70/stat"), format!("70 (a ) b) {fields} 1234 5\n")).unwrap();
        for name in [
            "tombolo-noise-70-1234",
            "tombolo-noise-70-1233",
            "tombolo-noise-71-1234",
            "tombolo-noise-x",
            "other",
        ] {
            fs::create_dir_all(instances.join(name)).unwrap();
        }
        remove_stale(&instances, &proc);
        let mut left: Vec<_> = fs::read_dir(&instances).unwrap().map(|e| e.unwrap().file_name()).collect();
        left.sort();
        fs::remove_dir_all(&folder).unwrap();
        assert_eq!(left, ["other", "tombolo-noise-70-1234", "tombolo-noise-x"]);
    }
}
