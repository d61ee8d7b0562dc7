// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Runs over real mounts: guests with the kernel module and a FUSE mount of the host, one tree.

use std::time::Instant;

use crate::fsx;
use crate::guest::Guest;
use crate::model::{Model, Reach};
use crate::remote::Remote;
use crate::rng::Rng;
use crate::site::{Boot, Mount, Site};
use crate::tree::{Spot, Tree};
use crate::turns::{Taker, Turns};
use crate::worker::{Ended, Load, Order, Report};

const GUESTS: [&str; 2] = ["guest-a", "guest-b"];

/// The length of a run.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct Amount {
    /// Operations by members that take turns in one tree
    #[arg(long, default_value_t = 4000)]
    turns: u64,
    /// Operations by members that take turns in one file
    #[arg(long, default_value_t = 4000)]
    fsx: u64,
    /// Members that take turns in one file: without the mount of the host, which cannot map it
    #[arg(long)]
    guests_only: bool,
    /// Seconds that all members work at once
    #[arg(long, default_value_t = 5)]
    seconds: u64,
}

/// Two guests and a FUSE mount in turns, then on one file, then at once.
pub fn run(seed: u64, mib: u64, boot: &Boot, amount: Amount) -> Result<String, String> {
    let site = Site::new(boot, mib)?;
    let mut guests = guests(&site)?;
    let (mount, remote) = Mount::new(&site, "fuse")?;
    let mut members = vec![(remote, false)];
    for (_, guest) in &mut guests {
        members.push((guest.mount()?, true));
    }
    let result = parts(seed, &site, &members, amount);
    let said: Vec<String> = guests.iter_mut().filter_map(|g| g.1.complaints().err()).collect();
    if !said.is_empty() {
        return Err(format!("{}; {:?}", said.join("; "), result));
    }
    result?;
    drop(members);
    for (_, guest) in &mut guests {
        guest.unmount()?;
    }
    drop((guests, mount));
    site.check()?;
    Ok("fsck finds nothing".into())
}

/// Two guests.
pub fn guests(site: &Site) -> Result<Vec<(&'static str, Guest)>, String> {
    GUESTS.iter().map(|name| Ok((*name, Guest::new(site, name)?))).collect()
}

fn parts(seed: u64, site: &Site, members: &[(Remote, bool)], amount: Amount) -> Result<(), String> {
    let since = Instant::now();
    let told = |done: String| println!("{done} [{:.1} s]", since.elapsed().as_secs_f64());
    if amount.turns > 0 {
        told(turns(seed, members, amount.turns)?);
    }
    if amount.fsx > 0 {
        let chosen = &members[usize::from(amount.guests_only)..];
        told(fsx::run(seed, chosen, amount.fsx)?);
    }
    if amount.seconds > 0 {
        told(at_once(seed, site, members, amount.seconds)?);
    }
    Ok(())
}

fn turns(seed: u64, members: &[(Remote, bool)], operations: u64) -> Result<String, String> {
    let takers: Vec<Taker<'_>> = members
        .iter()
        .map(|(remote, maps)| Taker { name: remote.name().to_owned(), tree: remote, maps: *maps })
        .collect();
    let own = directory(&members[0].0, "turns")?;
    let model = Model::new(own, None, "", Reach::Mapped);
    Turns::new(seed, model, takers).run(operations)?;
    Ok(format!("{operations} operations by {} members in turns: no difference", members.len()))
}

/// Makes a directory below the root.
fn directory(tree: &dyn Tree, name: &str) -> Result<Spot, String> {
    use crate::tree::{Answer, Call};
    let root = Spot { ino: 0, path: Some(Vec::new()) };
    let call = Call::Create { dir: root, name: Some(name.into()), what: libc::S_IFDIR, open: false };
    match tree.call(&call) {
        Ok(Answer::Number(ino)) => Ok(Spot { ino, path: Some(name.into()) }),
        other => Err(format!("{name}: {other:?}")),
    }
}

/// The reports of a member that works by itself.
#[derive(Debug, Default)]
pub struct Told {
    pub begun: u64,
    pub done: u64,
    /// None: it has ended.
    pub ended: Option<Ended>,
}

/// Receives a worker's reports until its load has ended, or the worker has.
pub fn hear(remote: &Remote) -> Told {
    let mut told = Told::default();
    loop {
        match remote.receive() {
            Ok(Report::B) => {
                told.begun += 1;
                // A worker that has ended needs no answer.
                let _ = remote.send(&Order::Go);
            }
            Ok(Report::D) => told.done += 1,
            Ok(Report::Ended(ended)) => {
                told.ended = Some(ended);
                return told;
            }
            Ok(_) | Err(_) => return told,
        }
    }
}

/// The work of one member in a round.
fn load(
    rng: &mut Rng,
    tree: &dyn Tree,
    shared: &Spot,
    member: &Remote,
    maps: bool,
) -> Result<(Load, u64), String> {
    let own = directory(tree, &format!("own-{}", member.name()))?;
    let load = Load {
        seed: rng.next(),
        own: own.path.unwrap_or_default(),
        shared: shared.path.clone().unwrap_or_default(),
        prefix: format!("{}-", member.name()),
        reach: if maps { Reach::Mapped } else { Reach::Mount },
    };
    Ok((load, own.ino))
}

/// Repeats the member's operations in a model, and compares that with the file system.
pub fn catch_up(tree: &dyn Tree, load: &Load, own: u64, shared: u64, told: &Told) -> Result<(), String> {
    let (mut model, mut rng) = load.model(own, shared);
    let mut last = None;
    for _ in 0..told.done {
        let op = model.random_op(&mut rng);
        // Inode numbers made meanwhile are learned when everything is compared.
        let _ = model.apply(&op);
        last = Some(op);
    }
    let open = (told.begun > told.done).then(|| model.random_op(&mut rng));
    model.adopt(tree, open.as_ref()).map_err(|why| {
        let said = told.ended.as_ref().and_then(|ended| ended.difference.as_deref());
        format!("{why}; the last that was done: {last:?}; it found itself: {said:?}")
    })
}

/// All members work at once, each in a directory of its own and under names of its own in a common one.
fn at_once(seed: u64, site: &Site, members: &[(Remote, bool)], seconds: u64) -> Result<String, String> {
    let mut rng = Rng(seed);
    let own = site.join("torture")?;
    let shared = directory(&members[0].0, "shared")?;
    let loads: Vec<(Load, u64)> = members
        .iter()
        .map(|(remote, maps)| load(&mut rng, remote, &shared, remote, *maps))
        .collect::<Result<_, String>>()?;
    let told: Vec<Told> = std::thread::scope(|scope| {
        let hearing: Vec<_> = members
            .iter()
            .zip(&loads)
            .map(|((remote, _), (load, _))| {
                scope.spawn(move || match remote.send(&Order::Load(load.clone())) {
                    Ok(()) => hear(remote),
                    Err(_) => Told::default(),
                })
            })
            .collect();
        std::thread::sleep(std::time::Duration::from_secs(seconds));
        for (remote, _) in members {
            // A worker that has ended is noticed below.
            let _ = remote.send(&Order::Stop);
        }
        hearing.into_iter().map(|h| h.join().unwrap_or_default()).collect()
    });
    let mut operations = 0;
    for (((remote, _), (load, at)), told) in members.iter().zip(&loads).zip(&told) {
        let ended = told.ended.as_ref().ok_or(format!("{} is gone", remote.name()))?;
        if let Some(why) = &ended.difference {
            return Err(format!("{}: {why}", remote.name()));
        }
        catch_up(own.fs(), load, *at, shared.ino, told).map_err(|e| format!("{}: {e}", remote.name()))?;
        operations += told.done;
    }
    Ok(format!("{operations} operations by {} members at once: no difference", members.len()))
}
