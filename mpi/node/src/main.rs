// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The part of `tombolo mpi` that runs in a VM: one process, a *node*, for each VM of a job, started by the host through the guest agent. It makes the VMs' ranks
//! look like those of one machine to an unmodified MPI library.
//!
//! The node answers what the guest has ([`facts`]), makes it ready ([`prepare`]: the job's directory as /dev/shm and one boot id, [`space`]; processes with the
//! ranks' numbers, [`seat`]), and then routes frames ([`job`]) until the job is over. The first VM's node also runs the launcher, which starts a wrapper for
//! each rank ([`rank`], [`wrappers`]); the wrapper has the rank started in its own VM. Between VMs frames go through files in the zone ([`link`]), as do the
//! ranks' connections to the launcher ([`relay`]).
//!
//! Launchers that start ranks in several VMs by themselves have another wrapper ([`wrap`]), which needs no node.
//!
//! - [`frame`]: the messages; [`stream`]: streams in pieces; [`family`]: the processes of the job; [`sys`]: the C library.

mod facts;
mod family;
mod frame;
mod job;
mod link;
mod prepare;
mod rank;
mod relay;
mod seat;
mod space;
mod stream;
mod sys;
mod wrap;
mod wrappers;

use std::fs::File;
use std::os::fd::AsRawFd;
use std::process::ExitCode;

use frame::{Fields, Frame, Kind};
use seat::Trouble;

/// The descriptors up to this one are taken at the start, so that those of seats are above.
const LOW: i32 = 3;

fn main() -> ExitCode {
    let mut words = std::env::args_os().skip(1);
    let result = match words.next() {
        Some(word) if word == "rank" => rank::run(words.collect()),
        Some(word) if word == "wrap" => wrap::run(words.collect()),
        Some(word) if word == "install" => {
            install(&words.map(|w| w.to_string_lossy().into_owned()).collect::<Vec<_>>())
        }
        Some(word) if word == "clean" => {
            clean(&words.map(|w| w.to_string_lossy().into_owned()).collect::<Vec<_>>())
        }
        _ => serve(),
    };
    match result {
        Ok(code) => ExitCode::from(u8::try_from(code & 0xff).unwrap_or(1)),
        Err(why) => {
            eprintln!("tombolo: {why}");
            ExitCode::FAILURE
        }
    }
}

/// Copies this program into the zone with this identity; prints the zone's mount point, the program's path and the largest process number.
fn install(zones: &[String]) -> Result<i32, String> {
    let mounts =
        std::fs::read_to_string("/proc/mounts").map_err(|e| format!("/proc/mounts can't be read: {e}"))?;
    let (mount, _) =
        zones.first().and_then(|zone| space::mount_of(&mounts, zone)).ok_or("the zone is not mounted")?;
    let path = space::install(&mount).map_err(|e| format!("{} can't be written: {e}", mount.display()))?;
    let largest = std::fs::read_to_string("/proc/sys/kernel/pid_max").unwrap_or_default();
    println!("{}\n{}\n{}", mount.display(), path.display(), largest.trim());
    Ok(0)
}

/// Removes what jobs have left in the zones with these identities.
fn clean(zones: &[String]) -> Result<i32, String> {
    let mounts =
        std::fs::read_to_string("/proc/mounts").map_err(|e| format!("/proc/mounts can't be read: {e}"))?;
    for (mount, _) in
        zones.iter().filter_map(|zone| space::mount_of(&mounts, zone)).filter(|(_, writes)| *writes)
    {
        for job in space::clean(&mount).map_err(|e| format!("{} can't be cleaned: {e}", mount.display()))? {
            println!("{}/.tombolo-mpi/{job}", mount.display());
        }
    }
    Ok(0)
}

/// Serves one job of the host.
fn serve() -> Result<i32, String> {
    let failed = |e: std::io::Error| e.to_string();
    loop {
        let null = File::open("/dev/null").map_err(failed)?;
        if null.as_raw_fd() > LOW {
            break;
        }
        std::mem::forget(null);
    }
    sys::set_mask(&sys::PASSED);
    sys::adopt_orphans();
    // Before this the shell that this process was may read too far.
    job::to_host(&Frame::new(Kind::Ready, 0, "")).map_err(failed)?;
    let prepared = loop {
        // Nothing is buffered beyond a frame: later ones are read by another thread.
        let Some(frame) = frame::read(&mut std::io::stdin().lock()).map_err(failed)? else { return Ok(0) };
        match frame.kind {
            Kind::Ask => {
                let facts = facts::answer(&Fields::decode(&frame.body));
                job::to_host(&Frame::new(Kind::Facts, 0, facts.encode())).map_err(failed)?;
            }
            Kind::Prepare => match prepare::prepare(&Fields::decode(&frame.body)) {
                Ok(prepared) => break prepared,
                Err(trouble) => {
                    let (kind, why) = match trouble {
                        Trouble::Collides => (Kind::Collides, String::new()),
                        Trouble::Other(why) => (Kind::Refused, why),
                    };
                    job::to_host(&Frame::new(kind, 0, why)).map_err(failed)?;
                }
            },
            _ => return Ok(0),
        }
    };
    let why = job::run(prepared).map_err(failed)?;
    if let Some(why) = why {
        job::to_host(&Frame::new(Kind::End, 0, why)).map_err(failed)?;
    }
    Ok(0)
}
