// SPDX-License-Identifier: Apache-2.0 OR MIT
//! For launchers that start ranks in several VMs by themselves (Slurm, hydra): a wrapper that gives its rank the view of the machine and the process number that
//! `tombolo mpi run` would give it, without a node. The wrappers of a job meet in the job's directory: each says which rank it has and where, and waits for all;
//! then one of each VM starts the shadows of the others' ranks.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use crate::seat::{self, Trouble};
use crate::space::Space;
use crate::sys::{self, Watch};

/// The longest time until all wrappers of a job have met.
const MEETING: Duration = Duration::from_secs(120);
/// Milliseconds after which a wrapper looks without an event.
const LOOK: i32 = 100;
/// Variables by which launchers tell a rank, and how many there are.
const RANK: [&str; 4] = ["SLURM_PROCID", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK"];
const RANKS: [&str; 4] = ["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE"];

/// A job, read from the variables of its launcher and of `tombolo mpi env`.
struct Job {
    name: String,
    mount: PathBuf,
    base: i32,
    rank: u32,
    ranks: u32,
}

impl Job {
    fn of_environment() -> Result<Job, String> {
        let value = |names: &[&str]| names.iter().find_map(|name| env::var(name).ok());
        let number = |names: &[&str]| {
            let text = value(names).ok_or_else(|| format!("no launcher has set {}", names.join(" or ")))?;
            text.parse().map_err(|_| format!("'{text}' is no number, in one of {}", names.join(", ")))
        };
        let set = |name: &str| {
            env::var(name).map_err(|_| format!("{name} is not set; 'tombolo mpi env VM' prints it"))
        };
        let step = || Some(format!("slurm{}s{}", value(&["SLURM_JOB_ID"])?, value(&["SLURM_STEP_ID"])?));
        let name = value(&["TOMBOLO_MPI_JOB"]).or_else(step);
        let name: String = name.unwrap_or_default().chars().filter(char::is_ascii_alphanumeric).collect();
        if name.is_empty() {
            return Err(
                "TOMBOLO_MPI_JOB is not set: a word that all ranks of a job have, and no other job".into()
            );
        }
        let base =
            set("TOMBOLO_MPI_BASE")?.parse().map_err(|_| "TOMBOLO_MPI_BASE is no number".to_owned())?;
        Ok(Job {
            name,
            mount: set("TOMBOLO_MPI_MOUNT")?.into(),
            base,
            rank: number(&RANK)?,
            ranks: number(&RANKS)?,
        })
    }

    /// A boot id that all VMs make of the job's name alike.
    fn boot_id(&self) -> String {
        // FNV-1a: it need only differ between jobs.
        let hash = |seed: u64| {
            self.name.bytes().fold(seed, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
        };
        let (high, low) = (hash(0xcbf2_9ce4_8422_2325), hash(0x8422_2325_cbf2_9ce4));
        let text = format!("{high:016x}{low:016x}");
        [&text[..8], &text[8..12], &text[12..16], &text[16..20], &text[20..]].join("-")
    }

    fn pid(&self, rank: u32) -> i32 {
        self.base + i32::try_from(rank).unwrap_or(0)
    }
}

/// Runs a program as a rank of the job that the environment tells. Returns the exit code.
///
/// # Errors
/// Something is missing, or a process number is taken.
pub fn run(words: Vec<OsString>) -> Result<i32, String> {
    let job = Job::of_environment()?;
    if !sys::is_root() {
        return Err("only root can arrange a job; start the wrapper as root".into());
    }
    let own = fs::read_to_string("/proc/sys/kernel/random/boot_id").map_err(|e| e.to_string())?;
    sys::set_mask(&sys::PASSED);
    let space = Space::join(&job.mount, &job.name, 1)
        .map_err(|e| format!("the job's directory in {} can't be made: {e}", job.mount.display()))?;
    space.enter(&job.boot_id())?;
    let result = serve(&job, &space.meeting(), own.trim(), words);
    drop(space.leave());
    match result? {
        status if status & 0x7f == 0 => Ok(status >> 8 & 0xff),
        status => sys::die_by(status & 0x7f),
    }
}

/// Starts the rank, meets the others, and waits for the rank's end: its status.
fn serve(job: &Job, meeting: &Path, own: &str, words: Vec<OsString>) -> Result<i32, String> {
    let failed = |e: io::Error| format!("rank {} can't be arranged: {e}", job.rank);
    fs::create_dir_all(meeting).map_err(failed)?;
    let (begin, go) = sys::pipe().map_err(failed)?;
    // SAFETY: this process has one thread, and the child becomes another program or ends.
    let child = unsafe { sys::fork(Some(job.pid(job.rank))) }.map_err(|e| {
        format!("the process number {} of rank {} can't be had: {e}", job.pid(job.rank), job.rank)
    })?;
    let Some(pid) = child else {
        drop(go);
        become_rank(begin.into(), words);
    };
    drop(begin);
    let told = meeting.join(format!("{}.new", job.rank));
    fs::write(&told, own)
        .and_then(|()| fs::rename(&told, meeting.join(job.rank.to_string())))
        .map_err(failed)?;
    let shadows = meet(job, meeting, own)?;
    fs::File::from(go).write_all(&[1]).map_err(failed)?;
    thread::spawn(move || {
        loop {
            sys::send_signal(pid, sys::wait_signal(&sys::PASSED));
        }
    });
    let status = loop {
        match sys::wait_any() {
            Some((ended, status)) if ended == pid => break status,
            Some(_) => {}
            None => return Err(format!("rank {} is lost", job.rank)),
        }
    };
    shadows.iter().for_each(|pid| sys::send_signal(*pid, sys::SIGKILL));
    Ok(status)
}

/// Waits for the word to begin, and becomes the program.
fn become_rank(mut begin: fs::File, words: Vec<OsString>) -> ! {
    sys::become_seat("mpi-seat");
    let mut word = [0];
    if begin.read_exact(&mut word).is_err() {
        sys::exit_now(1);
    }
    sys::set_mask(&[]);
    let why = words.split_first().map(|(program, arguments)| Command::new(program).args(arguments).exec());
    let name = words.first().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let _nobody_reads = writeln!(io::stderr(), "tombolo: '{name}' can't be run: {why:?}");
    sys::exit_now(127)
}

/// Waits until all ranks have their processes, here with the shadows of ranks of other VMs. Returns the shadows that this wrapper has started.
fn meet(job: &Job, meeting: &Path, own: &str) -> Result<Vec<i32>, String> {
    let failed = |e: io::Error| format!("rank {} can't meet the others: {e}", job.rank);
    let watch = Watch::new(meeting).map_err(failed)?;
    let end = Instant::now() + MEETING;
    let wait = |what: &str, ready: &dyn Fn() -> bool| {
        while !ready() {
            if Instant::now() > end {
                return Err(format!("rank {} has waited {} s for {what}", job.rank, MEETING.as_secs()));
            }
            watch.wait(LOOK);
        }
        Ok(())
    };
    let path = |name: u32| meeting.join(name.to_string());
    wait("the wrappers of all ranks", &|| (0..job.ranks).all(|rank| path(rank).exists()))?;
    let here = |rank: &u32| fs::read_to_string(path(*rank)).is_ok_and(|place| place == own);
    let ready = meeting.join(format!("shadows-{own}"));
    let mut shadows = Vec::new();
    if (0..job.ranks).find(here) == Some(job.rank) {
        for rank in (0..job.ranks).filter(|rank| !here(rank)) {
            match seat::shadow(job.pid(rank)) {
                Ok(seat) => shadows.push(seat.pid),
                Err(Trouble::Collides) => {
                    return Err(format!("another process has the number {} of rank {rank}", job.pid(rank)));
                }
                Err(Trouble::Other(why)) => return Err(why),
            }
        }
        fs::write(&ready, "").map_err(failed)?;
    }
    wait("the shadows of this VM", &|| ready.exists())?;
    Ok(shadows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_vms_make_the_same_boot_id_of_a_job_and_jobs_differ() {
        let job = |name: &str| Job { name: name.into(), mount: "/".into(), base: 1000, rank: 0, ranks: 2 };
        let id = job("slurm7s0").boot_id();
        assert_eq!((id.len(), id.matches('-').count()), (36, 4));
        assert_eq!(id, job("slurm7s0").boot_id());
        assert_ne!(id, job("slurm7s1").boot_id());
        assert_eq!(job("x").pid(3), 1003);
    }
}
