// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Makes a guest ready for its ranks: the job's directory, its view of the machine, its processes.

use std::fs;
use std::path::Path;

use crate::frame::Fields;
use crate::seat::{self, Seat, Trouble};
use crate::space::{self, Space};
use crate::sys;

/// A node that is ready.
#[derive(Debug)]
pub struct Prepared {
    pub number: u32,
    pub nodes: u32,
    /// The node of each rank.
    pub place: Vec<u32>,
    pub seats: Vec<Seat>,
    pub launcher: Option<Seat>,
    pub space: Space,
}

/// A job, as the host describes it to a node.
struct Job<'a> {
    name: &'a str,
    mount: &'a Path,
    boot_id: &'a str,
    number: u32,
    nodes: u32,
    place: Vec<u32>,
    base: i32,
    /// The CPUs of each rank of this node; none: any.
    cpus: Vec<Vec<usize>>,
}

impl Job<'_> {
    fn of(fields: &Fields) -> Option<Job<'_>> {
        let numbers =
            |text: &str, by: char| text.split(by).filter_map(|n| n.parse().ok()).collect::<Vec<usize>>();
        let place = fields.get("place")?.split(' ').map(str::parse).collect::<Result<_, _>>().ok()?;
        Some(Job {
            name: fields
                .get("job")
                .filter(|name| !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric()))?,
            mount: Path::new(fields.get("mount")?),
            boot_id: fields.get("boot_id")?,
            number: fields.parsed("node")?,
            nodes: fields.parsed("nodes")?,
            place,
            base: fields.parsed("base")?,
            cpus: fields.all("cpus").map(|list| numbers(list, ',')).collect(),
        })
    }
}

/// Makes this guest ready for the job that `fields` describe: `job`, `node`, `nodes`, `place` (the node of each rank), `base` (rank 0's process number),
/// `mount`, `boot_id`, and `cpus` for each own rank that is bound. After an error nothing is left of it.
///
/// # Errors
/// A process number is taken, or something else is in the way.
pub fn prepare(fields: &Fields) -> Result<Prepared, Trouble> {
    let job = Job::of(fields).ok_or_else(|| Trouble::Other("the host is of another version".into()))?;
    let space = Space::join(job.mount, job.name, job.nodes).map_err(|e| {
        Trouble::Other(format!("the job's directory in {} can't be made: {e}", job.mount.display()))
    })?;
    match enter(&job, &space) {
        Ok((seats, launcher)) => {
            Ok(Prepared { number: job.number, nodes: job.nodes, place: job.place, seats, launcher, space })
        }
        Err(trouble) => {
            drop(space.leave());
            Err(trouble)
        }
    }
}

/// Gives this process the job's view of the machine, and then starts the seats, which have it, too.
fn enter(job: &Job<'_>, space: &Space) -> Result<(Vec<Seat>, Option<Seat>), Trouble> {
    space.enter(job.boot_id).map_err(Trouble::Other)?;
    if job.number == 0 {
        install_wrapper().map_err(|e| Trouble::Other(format!("{} can't be written: {e}", space::WRAPPER)))?;
    }
    let mut seats = Vec::new();
    let all = start(job, &mut seats);
    if all.is_err() {
        for seat in &seats {
            sys::send_signal(seat.pid, sys::SIGKILL);
        }
        while sys::wait_any().is_some() {}
    }
    Ok((seats, all?))
}

/// Starts the seats of all ranks, and on the first node that of the launcher, which is returned.
fn start(job: &Job<'_>, seats: &mut Vec<Seat>) -> Result<Option<Seat>, Trouble> {
    let mut cpus = job.cpus.iter();
    for (node, pid) in job.place.iter().zip(job.base..) {
        seats.push(if *node == job.number {
            seat::waiting(Some(pid), cpus.next().map_or(&[], Vec::as_slice))?
        } else {
            seat::shadow(pid)?
        });
    }
    (job.number == 0).then(|| seat::waiting(None, &[])).transpose()
}

/// Copies this program to where the launcher finds it as the wrapper.
fn install_wrapper() -> std::io::Result<()> {
    fs::copy("/proc/self/exe", space::WRAPPER)?;
    fs::set_permissions(space::WRAPPER, std::os::unix::fs::PermissionsExt::from_mode(0o755))
}
