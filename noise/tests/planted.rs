// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Noise that is planted in a guest under TCG is found, named, and has its time; where nothing is planted, nothing is found. The guest is a host of
//! its own here: its kernel's trace has the causes.

use std::collections::BTreeMap;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use tombolo_noise::attribute::Explained;
use tombolo_noise::recording::{self, Recording};
use tombolo_noise::report::{Below, Measured, report};
use tombolo_noise::run::{COLLECTOR, NO_PATCHING, RESIDENT};
use tombolo_noise::source::{Kind, Source};
use tombolo_rig::guest::Guest;
use tombolo_rig::image::Image;
use tombolo_rig::kernel::Kernel;
use tombolo_rig::machine::Machine;

/// The CPU that is measured, its mask, and the mask of the other one.
const CPU: u32 = 1;
const MASK: &str = "2";
const OTHER_MASK: &str = "1";

/// Starts a guest whose kernel need not patch its code to record the collector's events: QEMU 7.2 gets that wrong now and then.
fn guest(folder: &Path) -> Guest {
    guest_with(folder, RESIDENT, &[])
}

fn guest_with(folder: &Path, kernel_arguments: &str, arguments: &[&str]) -> Guest {
    let collector = folder.join("collector");
    std::fs::write(&collector, COLLECTOR).unwrap();
    std::fs::set_permissions(&collector, std::fs::Permissions::from_mode(0o755)).unwrap();
    let cache = std::env::var_os("TOMBOLO_CACHE")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../.cache"), PathBuf::from);
    let kits = cache.join("guest");
    let kernel = Kernel::of_kit(&kits, "6.12").unwrap();
    let unloaded = vec![timer(&kits.join("6.12/build"), folder)];
    let image = folder.join("image");
    let programs = vec![collector, env!("CARGO_BIN_EXE_noise-plant").into(), "/usr/bin/chrt".into()];
    // The collector runs while its standard input is open, which a FIFO that is open for writing is.
    let setup = "mkfifo /tmp/open; mkdir /sys/kernel/tracing 2>/dev/null".into();
    Image { programs, unloaded, setup, ..Image::default() }.write(&kernel, &image).unwrap();
    let mut machine = Machine::new(&kernel.image, &image, &folder.join("console"));
    machine.kernel_arguments = kernel_arguments.to_owned();
    machine.arguments = arguments.iter().map(Into::into).collect();
    Guest::start(&machine).unwrap()
}

/// Builds the module that plants a timer, with the headers of the guest's kernel.
fn timer(headers: &Path, folder: &Path) -> PathBuf {
    let target = folder.join("timer");
    std::fs::create_dir_all(&target).unwrap();
    for file in ["Kbuild", "noise_plant_timer.c"] {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/timer").join(file);
        std::fs::copy(source, target.join(file)).unwrap();
    }
    let mut make = Command::new("make");
    make.arg("-C").arg(headers).arg(format!("M={}", target.display())).arg("modules");
    let made = make.output().unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    target.join("noise_plant_timer.ko")
}

/// The stretches in which a plant had the CPU by its own account while a recording was made.
fn planted(truth: &str, recording: &Recording) -> Vec<(u64, u64)> {
    let record = &recording.traced[0];
    let stretch = |line: &str| {
        let (start, end) = line.trim().split_once(' ').expect("two numbers");
        let (start, end): (u64, u64) = (start.parse().unwrap(), end.parse().unwrap());
        (start.max(record.first), end.min(record.last))
    };
    let stretches: Vec<_> = truth.lines().map(stretch).filter(|(start, end)| start < end).collect();
    // A host that is busy lets a guest run for few of its periods.
    assert!(!stretches.is_empty(), "the plant ran at other times: {truth}");
    stretches
}

/// The ticks of stretches.
fn sum(stretches: &[(u64, u64)]) -> u64 {
    stretches.iter().map(|(start, end)| end - start).sum()
}

/// Measures the guest's second CPU while `planted` runs, a command of the guest's shell that makes /tmp/begun and ends when /tmp/planted is gone.
fn measure(guest: &mut Guest, planted: &str) -> (Recording, String) {
    let measured =
        format!("collector {NO_PATCHING} --cpus {CPU} --seconds 1 --threshold-ns 5000 <&9 >/tmp/measured");
    guest
        .run(&format!(
            "exec 9<>/tmp/open; rm -f /tmp/begun; touch /tmp/planted; {{ {planted}; }} >/tmp/truth 2>&1 & \
             until [ -e /tmp/begun ]; do sleep 0.1; done; {measured}; rc=$?; rm /tmp/planted; wait; exit $rc"
        ))
        .unwrap();
    let truth = guest.run("cat /tmp/truth").unwrap();
    // An emulated serial port takes its time for each byte.
    let packed = guest.run("gzip -c /tmp/measured | base64 -w 0").unwrap();
    (recording::parse(&unpacked(&packed)).unwrap(), truth)
}

/// Returns bytes that gzip and base64 have packed.
fn unpacked(text: &str) -> Vec<u8> {
    let mut command = Command::new("sh");
    command.args(["-c", "base64 -d | gzip -dc"]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let (mut input, text) = (child.stdin.take().unwrap(), text.to_owned());
    let writer = std::thread::spawn(move || input.write_all(text.as_bytes()));
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap().unwrap();
    assert!(output.status.success(), "{}", output.status);
    output.stdout
}

fn explained(recording: &Recording) -> Measured {
    report("host", 5.0, recording, &Below::default(), None)
}

fn gaps(measured: &Measured) -> &[Explained] {
    &measured.gaps[0].1
}

fn names(measured: &Measured) -> Vec<String> {
    measured.report.sources.iter().map(|row| row.source.to_string()).collect()
}

#[test]
fn planted_noise_is_found_and_nothing_is_invented() {
    let folder = tempfile::tempdir().unwrap();
    let mut guest = guest(folder.path());

    // Nothing planted.
    let (quiet, _) = measure(&mut guest, ": >/tmp/begun");
    assert_eq!((quiet.traced.len(), quiet.lost), (1, 0), "{:?}", quiet.notes);
    let quiet = explained(&quiet);
    let plant = Source::here(Kind::Thread, "noise-plant");
    assert!(names(&quiet).contains(&"timer interrupt".to_owned()), "{:?}", names(&quiet));
    assert!(!quiet.report.sources.iter().any(|row| row.source == plant || row.source.name.contains("ttyS0")));

    // A real-time thread, every 10 ms for 200 µs.
    let thread = format!("taskset {MASK} chrt -f 50 noise-plant /tmp/planted /tmp/begun");
    let (recording, truth) = measure(&mut guest, &thread);
    let stretches = planted(&truth, &recording);
    let ticks = sum(&stretches);
    let measured = explained(&recording);
    let found: u64 = gaps(&measured).iter().map(|gap| gap.of(&plant)).sum();
    assert!(found * 100 >= ticks * 95, "{found} of {ticks} ticks: {:?}", names(&measured));
    println!(
        "planted thread: {found} ticks found, {ticks} ticks by its own account, in {} stretches",
        stretches.len()
    );

    // A timer of the kernel's, which does as much in the handler of its interrupt.
    let timer = format!(
        "insmod /modules/noise_plant_timer.ko cpu={CPU}; : >/tmp/begun; while [ -e /tmp/planted ]; do sleep 0.1; done; \
         cat /proc/noise-plant-timer; rmmod noise_plant_timer"
    );
    let (recording, truth) = measure(&mut guest, &timer);
    let stretches = planted(&truth, &recording);
    let measured = explained(&recording);
    let interrupt = Source::here(Kind::Timer, "");
    // The kernel's tick has the same source, so only what lies in the plant's stretches counts.
    let in_stretches = |gap: &Explained| -> u64 {
        let overlap =
            |(start, end): &(u64, u64)| gap.gap.end.min(*end).saturating_sub(gap.gap.start.max(*start));
        stretches.iter().map(overlap).sum()
    };
    let found: u64 = gaps(&measured).iter().map(|gap| gap.of(&interrupt).min(in_stretches(gap))).sum();
    let ticks = sum(&stretches);
    assert!(found * 100 >= ticks * 95, "{found} of {ticks} ticks: {:?}", names(&measured));
    println!(
        "planted timer: {found} ticks found, {ticks} ticks by its own account, in {} stretches",
        stretches.len()
    );

    // A device's interrupts: the console's, sent to the measured CPU by a writer on the other one.
    guest.run(&format!("echo {MASK} >/proc/irq/4/smp_affinity")).unwrap();
    let storm = format!(
        "exec 1>/dev/ttyS0; taskset {OTHER_MASK} sh -c 'while [ -e /tmp/planted ]; do echo storm; : >/tmp/begun; done'"
    );
    let (recording, _) = measure(&mut guest, &storm);
    let measured = explained(&recording);
    let interrupts = measured.report.sources.iter().find(|row| row.source.kind == Kind::Interrupt);
    assert_eq!(
        interrupts.map(|row| row.source.name.as_str()),
        Some("ttyS0 (irq 4)"),
        "{:?}",
        names(&measured)
    );
    assert!(!names(&measured).contains(&plant.to_string()));

    // Each part of each gap has a source, and no source has more than the gap.
    for one in [&quiet, &measured] {
        for gap in gaps(one) {
            let parts: u64 = gap.parts.iter().map(|part| part.ticks).sum();
            assert_eq!(parts + gap.tracing, gap.gap.end - gap.gap.start);
        }
    }
}

#[test]
fn beside_two_lasting_buffers_the_collector_has_the_kernel_patch_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let kernel_arguments = format!("nokaslr {RESIDENT}");
    let found = guest_with(folder.path(), "nokaslr", &[])
        .run("grep ' text_poke_bp_batch$' /proc/kallsyms | cut -d' ' -f1")
        .unwrap();
    let address = u64::from_str_radix(&found, 16).unwrap_or_else(|e| panic!("{found}: {e}"));
    // QEMU writes a line each time that the guest enters the function which writes all patches of a running kernel.
    let log = folder.path().join("log");
    let mut guest = guest_with(
        folder.path(),
        &kernel_arguments,
        &["-d", "exec", "-dfilter", &format!("{address:#x}+8"), "-D", log.to_str().unwrap()],
    );
    let patches = || {
        let text = std::fs::read_to_string(&log).unwrap();
        let count = |begin| text.lines().filter(|line| line.starts_with(begin)).count();
        // An interrupt came first; the line comes again after it.
        count("Trace ") - count("Stopped execution of TB chain before ")
    };
    let booted = patches();
    assert!(booted > 0, "a kernel that boots patches its code");
    let (recording, _) = measure(&mut guest, ": >/tmp/begun");
    assert_eq!(recording.traced.len(), 1, "{:?}", recording.notes);
    assert_eq!(patches(), booted);
}

#[test]
fn what_a_killed_collector_has_left_the_next_one_removes() {
    let folder = tempfile::tempdir().unwrap();
    let mut guest = guest(folder.path());
    guest.run("mount -t tracefs none /sys/kernel/tracing").unwrap();
    // Beside those of the kernel's arguments.
    let buffers = "ls /sys/kernel/tracing/instances | grep -v '^resident-[12]$' || true";
    assert_eq!(guest.run(buffers).unwrap(), "");
    guest
        .run(&format!(
            "exec 9<>/tmp/open; collector {NO_PATCHING} --watch <&9 >/tmp/out & \
             until grep -q watching /tmp/out; do sleep 0.1; done; kill -9 $!; wait; true",
        ))
        .unwrap();
    assert!(guest.run(buffers).unwrap().starts_with("tombolo-noise-"));
    let again = format!("collector {NO_PATCHING} --watch </dev/null >/tmp/out && grep -q '^end' /tmp/out");
    guest.run(&again).unwrap();
    assert_eq!(guest.run(buffers).unwrap(), "");
}

#[test]
fn a_guest_without_privileges_is_measured_and_told_what_is_missing() {
    let folder = tempfile::tempdir().unwrap();
    let mut guest = guest_with(folder.path(), "", &[]);
    guest.run("mkdir -p /etc; echo 'a:x:1000:1000::/:/bin/sh' >/etc/passwd; chmod 666 /tmp/open").unwrap();
    let output = guest
        .run("exec 9<>/tmp/open; chmod 777 /tmp; su a -c 'collector --seconds 0.2 <&9'")
        .unwrap()
        .replace("\r\n", "\n");
    let recording = recording::parse((output + "\n").as_bytes()).unwrap();
    assert!(recording.traced.is_empty() && recording.plain.len() == 2);
    assert!(recording.notes.iter().any(|note| note.contains("CAP_SYS_ADMIN")), "{:?}", recording.notes);
    let kinds: BTreeMap<Kind, f64> =
        explained(&recording).report.sources.iter().map(|row| (row.source.kind, row.us_per_second)).collect();
    assert!(kinds.keys().all(|kind| matches!(kind, Kind::Unknown | Kind::Steal)), "{kinds:?}");
    // With privileges, and a kernel that would patch its code: it is told the arguments that spare it that.
    let unpatched = format!("exec 9<>/tmp/open; collector {NO_PATCHING} --seconds 0.2 <&9");
    let recording =
        recording::parse((guest.run(&unpatched).unwrap().replace("\r\n", "\n") + "\n").as_bytes()).unwrap();
    assert!(recording.traced.is_empty() && recording.plain.len() == 2);
    assert!(recording.notes.iter().any(|note| note.ends_with(RESIDENT)), "{:?}", recording.notes);
    let leaves = format!(
        "exec 9<>/tmp/open; collector {NO_PATCHING} --cpus 1 --seconds 2 <&9 >/tmp/out 2>&1 & \
         until grep -qx 'Cpus_allowed_list:.1' /proc/$!/task/*/status; do :; done; \
         echo 0 >/sys/devices/system/cpu/cpu1/online; wait $! || cat /tmp/out; echo 1 >/sys/devices/system/cpu/cpu1/online"
    );
    let said = guest.run(&leaves).unwrap();
    // It leaves before the measurement or during it.
    assert!(
        said.contains("bound to the CPUs [1]") || said.contains("CPU 1 went offline while it was measured"),
        "{said}"
    );
    let offline = format!(
        "echo 0 >/sys/devices/system/cpu/cpu1/online; collector {NO_PATCHING} --cpus 1 </dev/null 2>&1 || true"
    );
    assert!(guest.run(&offline).unwrap().contains("CPU 1 is offline; switch it on: echo 1 >"));
}
