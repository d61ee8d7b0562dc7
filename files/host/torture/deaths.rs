// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Members that die under load, as they do outside of tests: QEMU killed, the guest's kernel panicked, the machine reset, the FUSE
//! mount's process killed. In each round all members work, one dies at any instant, and the others go on within a bound. Then the
//! state must match the operations acknowledged to each member, fsck must find nothing, and the dead one comes back.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use tombolo_files::fs::{Create, Filesystem, ROOT};

use crate::guest::Guest;
use crate::model::Reach;
use crate::remote::{Remote, TIMEOUT};
use crate::rng::Rng;
use crate::site::{Boot, Mount, Site};
use crate::together::{Told, catch_up, guests, hear};
use crate::tree::Spot;
use crate::worker::{Load, Order};

/// The longest time of a survivor's operation, with a death and the recovery.
const LONGEST: Duration = Duration::from_secs(2);
/// No file is open any more so soon after the last operation.
const SETTLED: Duration = Duration::from_secs(10);
const MOUNT: &str = "fuse";

/// A member that lives and dies.
enum Body {
    Guest(Box<Guest>),
    Mount(Mount),
}

struct Member {
    name: &'static str,
    body: Body,
    remote: Remote,
}

/// The sums of all rounds.
#[derive(Default)]
struct Tally {
    operations: u64,
    in_the_middle: u64,
    longest: Duration,
    longest_raw: Duration,
    what: String,
    ways: BTreeMap<&'static str, u64>,
}

/// Kills `kills` times.
pub fn run(seed: u64, mib: u64, boot: &Boot, kills: u64) -> Result<String, String> {
    let site = Site::new(boot, mib)?;
    let mut rng = Rng(seed);
    let (mount, remote) = Mount::new(&site, MOUNT)?;
    let mut members = vec![Member { name: MOUNT, body: Body::Mount(mount), remote }];
    for (name, mut guest) in guests(&site)? {
        let remote = guest.mount()?;
        members.push(Member { name, body: Body::Guest(Box::new(guest)), remote });
    }
    let mut tally = Tally::default();
    let since = Instant::now();
    for n in 0..kills {
        let victim = rng.below(members.len() as u64) as usize;
        round(&site, &mut members, victim, &mut rng, &mut tally).map_err(|e| {
            let name = members[victim].name;
            format!("kill {n}, of {name}: {e}; {}", tally.line())
        })?;
        if (n + 1) % 20 == 0 {
            println!("{} kills [{:.0} s]; {}", n + 1, since.elapsed().as_secs_f64(), tally.line());
        }
        members[victim].revive(&site)?;
    }
    for Member { mut body, remote, .. } in members {
        drop(remote);
        if let Body::Guest(guest) = &mut body {
            guest.complaints()?;
            guest.unmount()?;
        }
    }
    site.check()?;
    Ok(format!("{kills} kills: nothing lost, fsck finds nothing; {}", tally.line()))
}

impl Tally {
    fn line(&self) -> String {
        let ways: Vec<String> = self.ways.iter().map(|(way, n)| format!("{way} {n}")).collect();
        format!(
            "{} ({} in the middle of an operation), {} operations, a survivor's longest {} ms ({} ms with what its machine stood still): {}",
            ways.join(", "),
            self.in_the_middle,
            self.operations,
            self.longest.as_millis(),
            self.longest_raw.as_millis(),
            self.what
        )
    }
}

fn round(
    site: &Site,
    members: &mut [Member],
    victim: usize,
    rng: &mut Rng,
    tally: &mut Tally,
) -> Result<(), String> {
    let own = site.join("torture")?;
    let fs = own.fs();
    let shared = directory(fs, "shared")?;
    let mut loads = Vec::new();
    for member in members.iter() {
        let base = directory(fs, member.name)?;
        let load = Load {
            seed: rng.next(),
            own: base.path.unwrap_or_default(),
            shared: shared.path.clone().unwrap_or_default(),
            prefix: format!("{}-", member.name),
            reach: if matches!(member.body, Body::Guest(_)) { Reach::Mapped } else { Reach::Mount },
        };
        loads.push((load, base.ino));
    }
    for (member, (load, _)) in members.iter().zip(&loads) {
        member.remote.send(&Order::Load(load.clone()))?;
    }
    let before = Duration::from_millis(rng.below(800));
    let after = Duration::from_millis(100 + rng.below(400));
    let way = rng.below(3);
    let (remotes, bodies): (Vec<&Remote>, Vec<&mut Body>) =
        members.iter_mut().map(|m| (&m.remote, &mut m.body)).unzip();
    let told: Vec<Told> = std::thread::scope(|scope| {
        let hearing: Vec<_> = remotes.iter().map(|remote| scope.spawn(move || hear(remote))).collect();
        std::thread::sleep(before);
        let way = bodies.into_iter().nth(victim).map(|body| kill(site, body, way));
        std::thread::sleep(after);
        for remote in &remotes {
            // The dead member does not receive it.
            let _ = remote.send(&Order::Stop);
        }
        let told = hearing.into_iter().map(|h| h.join().unwrap_or_default()).collect();
        *tally.ways.entry(way.ok_or("no victim")??).or_default() += 1;
        Ok::<_, String>(told)
    })?;
    for (i, (member, told)) in members.iter().zip(&told).enumerate() {
        tally.operations += told.done;
        if i == victim {
            tally.in_the_middle += u64::from(told.begun > told.done);
            continue;
        }
        let ended = told.ended.as_ref().ok_or_else(|| format!("{} did not survive", member.name))?;
        if let Some(why) = &ended.difference {
            return Err(format!("{}, a survivor: {why}", member.name));
        }
        tally.longest_raw = tally.longest_raw.max(Duration::from_nanos(ended.longest_raw));
        let longest = Duration::from_nanos(ended.longest);
        if longest > tally.longest {
            tally.longest = longest;
            tally.what = format!("{}, {}", member.name, ended.what);
        }
        if longest > LONGEST {
            return Err(format!(
                "{}, a survivor, waited {} ms: {}",
                member.name,
                longest.as_millis(),
                ended.what
            ));
        }
    }
    fs.recover_all().map_err(|e| format!("recovery: {e}"))?;
    for ((member, (load, at)), told) in members.iter().zip(&loads).zip(&told) {
        catch_up(fs, load, *at, shared.ino, told).map_err(|e| format!("what {} did: {e}", member.name))?;
    }
    // The kernel tells a FUSE mount of a file's last close after the close.
    let since = Instant::now();
    loop {
        match site.check() {
            Err(why) if since.elapsed() > SETTLED => return Err(why),
            Err(_) => std::thread::sleep(Duration::from_millis(20)),
            Ok(()) => break,
        }
    }
    clear(fs, ROOT)
}

/// Kills it, and returns when its death has been declared.
fn kill(site: &Site, body: &mut Body, way: u64) -> Result<&'static str, String> {
    match body {
        Body::Mount(mount) => {
            mount.kill();
            let since = Instant::now();
            while site.present()?.iter().any(|name| name == MOUNT) {
                if since.elapsed() > TIMEOUT {
                    return Err("the mount's death is not declared".into());
                }
                std::thread::sleep(Duration::from_millis(5));
            }
            Ok("mount killed")
        }
        Body::Guest(guest) => {
            let way = match way {
                0 => {
                    guest.start("echo c > /proc/sysrq-trigger")?;
                    "guest panicked"
                }
                1 => {
                    guest.monitor("system_reset", serde_json::json!({}))?;
                    "guest reset"
                }
                _ => {
                    guest.kill();
                    "QEMU killed"
                }
            };
            guest.wait_gone()?;
            Ok(way)
        }
    }
}

impl Member {
    /// A new one in place of a dead one, under its name.
    fn revive(&mut self, site: &Site) -> Result<(), String> {
        match &mut self.body {
            Body::Mount(mount) => {
                mount.end();
                let (mount, remote) = Mount::new(site, MOUNT)?;
                (self.body, self.remote) = (Body::Mount(mount), remote);
            }
            Body::Guest(_) => {
                let mut guest = Guest::new(site, self.name)?;
                self.remote = guest.mount()?;
                self.body = Body::Guest(Box::new(guest));
            }
        }
        Ok(())
    }
}

fn directory(fs: &Filesystem, name: &str) -> Result<Spot, String> {
    let ino = fs
        .create(ROOT, Some(name.as_bytes()), &Create::mode(libc::S_IFDIR | 0o755))
        .map_err(|e| format!("{name}: {e}"))?;
    Ok(Spot { ino: ino.ino, path: Some(name.into()) })
}

/// Removes all that is below a directory.
fn clear(fs: &Filesystem, dir: u64) -> Result<(), String> {
    let text = |e: rustix::io::Errno| format!("clearing inode {dir}: {e}");
    for entry in fs.list(dir).map_err(text)? {
        if entry.kind == libc::DT_DIR {
            clear(fs, entry.ino)?;
            fs.rmdir(dir, &entry.name, None).map_err(text)?;
        } else {
            fs.unlink(dir, &entry.name, None).map_err(text)?;
        }
    }
    Ok(())
}
