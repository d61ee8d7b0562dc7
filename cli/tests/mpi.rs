// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo mpi` with Debian's libraries, unmodified, in two emulated guests with one CPU each (guest/mpi.list).

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use common::{Lab, TIMEOUT, plain, setting, signal};

mod common;

/// The libraries, by the words of `--launcher` and the ends of Debian's compilers' names.
const LIBRARIES: [&str; 2] = ["openmpi", "mpich"];

/// Two guests that share a zone, with the test programs in it.
struct Pair {
    lab: Lab,
}

impl Pair {
    fn up() -> Pair {
        Pair::up_with("", "")
    }

    /// With more keys of the two VMs, and more of the compose file.
    fn up_with(keys: &str, more: &str) -> Pair {
        let image = plain::kit().join("initrd-mpi.img");
        let vm = |name: &str, more: &str| {
            format!(
                "[vm.{name}]\nkernel = \"6.1\"\ninitrd = {image:?}\nmemory = \"768M\"\ncpus = 1\n\
                 zones = {{ shared = {{ mount = \"/mnt/shared\"{more} }} }}\n"
            )
        };
        let readers = vm("reader", ", rights = \"ro\"").replace("initrd-mpi", "initrd-test");
        let lab = Lab::new(&format!(
            "[zone.shared]\nsize = \"192M\"\nbacking = \"./shared.zone\"\nfiles = true\n{}{}{readers}",
            vm("a", "") + keys,
            vm("b", "") + keys + more
        ));
        lab.good(&["up", "a", "b"]);
        let pair = Pair { lab };
        for library in LIBRARIES {
            for name in ["together", "alltoall"] {
                let program = pair.compile(library, name);
                let name = program.file_name().unwrap().to_str().unwrap();
                pair.lab.good(&["cp", program.to_str().unwrap(), &format!("a:/mnt/shared/{name}")]);
            }
        }
        pair
    }

    /// Compiles one of `mpi/tests/programs` with a library of this machine, which is that of the guests.
    fn compile(&self, library: &str, name: &str) -> PathBuf {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../mpi/tests/programs");
        let program = self.lab.dir.path().join(format!("{name}.{library}"));
        let compiler = format!("mpicc.{library}");
        let compiled = Command::new(&compiler)
            .args(["-Wall", "-O2", "-o"])
            .arg(&program)
            .arg(source.join(format!("{name}.c")))
            .status()
            .unwrap_or_else(|e| panic!("{compiler}: {e} (scripts/bootstrap test)"));
        assert!(compiled.success());
        program
    }

    fn run(&self, options: &[&str], program: &[&str]) -> Output {
        self.lab.run(&[&["mpi", "run"], options, &["--"], program].concat())
    }

    fn good(&self, options: &[&str], program: &[&str]) -> String {
        let output = self.run(options, program);
        let err = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{options:?} {program:?}: {}\n{err}", output.status);
        String::from_utf8(output.stdout).unwrap()
    }

    /// What the job's processes and files are in a VM, beside the lock that stays.
    fn left(&self, vm: &str) -> String {
        let script = "ps -o args | grep -E '^(mpi|/dev/shm|./alltoall|/usr/bin/(mpi|orterun))' | grep -v grep
            ls -A /mnt/shared/.tombolo-mpi /dev/shm | grep -v -e lock -e :$ -e '^$'; true";
        self.lab.good(&["exec", vm, "--", "sh", "-c", script])
    }

    /// Asserts that nothing is left of any job. Nodes that were told to end by a connection's end may still be at it.
    fn assert_nothing_left(&self) {
        let begun = Instant::now();
        for vm in ["a", "b"] {
            loop {
                let left = self.left(vm);
                if left.is_empty() {
                    break;
                }
                assert!(begun.elapsed() < TIMEOUT, "in {vm}: {left}");
            }
        }
    }

    /// Starts an endless exchange and waits until it runs.
    fn exchange(&self, library: &str) -> Exchange {
        let program = format!("./alltoall.{library}");
        let mut command = self.lab.command(&["mpi", "run", "-n", "2", "--vms", "a,b", "--", &program]);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        out.read_line(&mut line).unwrap();
        if line != "turns\n" {
            panic!("{line:?}: {}", String::from_utf8_lossy(&child.wait_with_output().unwrap().stderr));
        }
        Exchange { child, _out: out }
    }

    fn qemu(&self, vm: &str) -> u32 {
        let ps = self.lab.ps();
        let vm = ps["vms"].as_array().unwrap().iter().find(|v| v["name"] == vm).unwrap();
        u32::try_from(vm["pid"].as_u64().unwrap()).unwrap()
    }

    /// Kills a rank in a VM; returns when.
    fn kill_rank(&self, vm: &str, library: &str) -> Instant {
        let script = format!("kill -9 $(pidof alltoall.{library} | tr ' ' '\\n' | sort -n | tail -n 1)");
        let before = Instant::now();
        self.lab.good(&["exec", vm, "--", "sh", "-c", &script]);
        before
    }
}

#[test]
fn hydras_own_launch_in_two_vms_gives_ranks_that_talk_through_memory_alone() {
    let pair = Pair::up_with("networks = [\"lan\"]\n", "[net.lan]\nsubnet = \"10.86.0.0/24\"\n");
    std::fs::write(pair.lab.dir.path().join("env.sh"), pair.lab.good(&["mpi", "env", "a"])).unwrap();
    pair.lab.good(&["cp", "env.sh", "a:/mnt/shared/env.sh"]);
    let script = |line: &str| {
        format!("ip link set lo up; cd /mnt/shared; . ./env.sh; export TOMBOLO_MPI_JOB=one; {line}")
    };
    let hydra = "mpiexec.hydra -launcher manual -hosts 10.86.0.2,10.86.0.3 -ppn 1 -n 2 \"$TOMBOLO_MPI_WRAP\" wrap ./together.mpich";
    let mut command = pair.lab.command(&["exec", "a", "--", "sh", "-c", &script(hydra)]);
    let mut launcher = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(launcher.stdout.take().unwrap()).lines().map(Result::unwrap);
    // It prints the command that starts its proxy in each VM.
    let proxies = ["a", "b"].map(|vm| {
        let line = lines.next().unwrap();
        let proxy = line.strip_prefix("HYDRA_LAUNCH: ").unwrap_or_else(|| panic!("{line}"));
        pair.lab.command(&["exec", vm, "--", "sh", "-c", &script(proxy)]).spawn().unwrap()
    });
    let mut said: Vec<String> = lines.filter(|line| line.starts_with("rank")).collect();
    said.sort_unstable();
    // Hydra tells the library that these are two machines, and so the library says.
    assert_eq!(said, [0, 1].map(|rank| format!("rank {rank} of 2 on guest shares with 1")));
    assert!(launcher.wait().unwrap().success());
    for mut proxy in proxies {
        assert!(proxy.wait().unwrap().success());
    }
    assert_eq!(pair.lab.good(&["exec", "a", "--", "ls", "-A", "/mnt/shared/.tombolo-mpi"]), "lock\nwrap\n");
}

/// A job that runs until it is ended.
struct Exchange {
    child: Child,
    _out: BufReader<std::process::ChildStdout>,
}

impl Exchange {
    /// Waits for the job's end; returns its exit code and its error output.
    fn end(self) -> (Option<i32>, String) {
        let output = self.child.wait_with_output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    }
}

#[test]
fn ranks_of_two_vms_are_one_job_of_either_library() {
    let pair = Pair::up();
    for library in LIBRARIES {
        let program = format!("./together.{library}");
        let file = format!("/mnt/shared/file.{library}");
        let out = pair.good(&["-n", "2", "--vms", "a,b", "-l"], &[&program, &file]);
        let mut lines: Vec<&str> = out.lines().collect();
        lines.sort_unstable();
        let said = |rank: u32| format!("{rank}: rank {rank} of 2 on guest shares with 2");
        assert_eq!(lines, [said(0), said(1)], "{library}");
        // A VM alone, with more ranks than CPUs.
        let out = pair.good(&["-n", "2", "--vms", "b"], &[&format!("./alltoall.{library}"), "2"]);
        assert_eq!(out, "turns\n");
        pair.assert_nothing_left();
    }

    // Folder, variables, input, exit code and streams are the launcher's.
    let script = "read -r line; echo \"$line $WORD $PWD\"; echo err >&2; exit 7";
    let mut command = pair.lab.command(&["mpi", "run", "-n", "1", "--vms", "b", "--launcher", "mpich"]);
    command.args(["-e", "WORD=a value", "-C", "/tmp", "--", "sh", "-c", script]);
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), b"input\n").unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout).lines().next(), Some("input a value /tmp"));
    assert!(String::from_utf8_lossy(&output.stderr).contains("err"));
    assert_eq!(output.status.code(), Some(7));

    // Two jobs at once see nothing of each other.
    let other = pair.exchange("mpich");
    pair.good(&["-n", "2", "--vms", "a,b"], &["./together.openmpi"]);
    signal(other.child.id(), "INT");
    assert_eq!(other.end().0, Some(130));
    pair.assert_nothing_left();

    // A line of JSON for each event.
    let out =
        pair.lab.good(&["--json", "mpi", "run", "-n", "2", "--vms", "a,b", "--", "./alltoall.mpich", "1"]);
    let events: Vec<serde_json::Value> =
        out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let count = |event: &str| events.iter().filter(|line| line["event"] == event).count();
    assert_eq!([count("starts"), count("began"), count("ended")], [1, 2, 2], "{out}");

    refuses_what_can_not_run(&pair);
}

/// One message, nothing started, nothing left.
fn refuses_what_can_not_run(pair: &Pair) {
    let refused = |options: &[&str], program: &str, message: &str| {
        let output = pair.run(options, &[program]);
        let err = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && output.stdout.is_empty(), "{options:?}");
        assert!(err.contains(message) && err.lines().count() == 1, "{options:?}: {err}");
    };
    let both: &[&str] = &["-n", "2", "--vms", "a,b"];
    refused(both, "./nothing", "the VM 'a' has no program './nothing' in /mnt/shared");
    refused(&["-n", "2", "--vms", "a,nobody"], "./together.mpich", "runs no VM 'nobody'");
    refused(&["-n", "2", "--vms", "a,a"], "./together.mpich", "names 'a' twice");
    refused(&["-n", "1", "--vms", "a,b"], "./together.mpich", "1 ranks are too few for 2 VMs");
    refused(&["-n", "100", "--vms", "a,b"], "./together.mpich", "100 ranks of MPICH need");
    refused(&[both, &["--launcher", "/bin/true"]].concat(), "./together.mpich", "no launcher '/bin/true'");
    refused(&[both, &["--zone", "other"]].concat(), "./together.mpich", "are members of a zone 'other'");
    refused(both, "sh", "has Open MPI and MPICH; say --launcher");
    pair.lab.good(&["up", "reader"]);
    refused(&["-n", "3"], "./together.mpich", "the VM 'reader' may only read the zone 'shared'");
    pair.lab.good(&["zone", "detach", "shared", "reader"]);
    refused(&["-n", "3"], "./together.mpich", "the VMs a, b, reader have no zone in common");
    pair.assert_nothing_left();
}

#[test]
fn a_rank_or_a_vm_that_dies_ends_the_job_and_leaves_nothing() {
    let pair = Pair::up();
    let kills = setting("TOMBOLO_MPI_KILLS", 3);
    let mut seed = setting("TOMBOLO_MPI_SEED", 1);
    let mut slowest = Duration::ZERO;
    for kill in 0..kills {
        // Numerical Recipes' generator: its high bits choose.
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let library = LIBRARIES[usize::try_from(seed >> 40 & 1).unwrap()];
        let vm = ["a", "b"][usize::try_from(seed >> 41 & 1).unwrap()];
        // The first of four deaths is a VM's.
        let whole = kill % 4 == 0;
        let job = pair.exchange(library);
        let begun = if whole {
            signal(pair.qemu(vm), "KILL");
            Instant::now()
        } else {
            pair.kill_rank(vm, library)
        };
        let (code, err) = job.end();
        slowest = slowest.max(begun.elapsed());
        let named = if whole {
            format!("the VM '{vm}' with rank")
        } else {
            format!("in the VM '{vm}' was killed by signal 9")
        };
        assert!(code != Some(0) && err.contains(&named), "{kill} {library}: {code:?} {err}");
        if whole {
            pair.lab.good(&["up", vm]);
        }
        pair.assert_nothing_left();
        pair.good(&["-n", "2", "--vms", "a,b"], &[&format!("./alltoall.{library}"), "3"]);
    }
    // On a machine with nothing else to do it is two seconds at most.
    eprintln!("{kills} deaths; the slowest end took {slowest:?}");

    // The command itself is killed: the nodes end the job.
    let job = pair.exchange("openmpi");
    signal(job.child.id(), "KILL");
    job.end();
    pair.assert_nothing_left();
    pair.lab.good(&["down"]);
    let zone = pair.lab.dir.path().join("shared.zone");
    let fsck = pair.lab.run(&["files", "fsck", "-n", zone.to_str().unwrap()]);
    assert!(fsck.status.success(), "{fsck:?}");
}
