// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Members that take turns, and members at once.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use tombolo_files::fs::{Create, Filesystem, Handle, ROOT};

use crate::model::{Model, Reach};
use crate::rng::Rng;
use crate::tree::Spot;
use crate::turns::{Taker, Turns};
use crate::zone::Zone;

/// Runs every operation as a random member; another member then checks it.
pub fn turns(seed: u64, mib: u64, operations: u64, members: u32) -> Result<String, String> {
    let zone = Zone::new(mib)?;
    let handles: Vec<Filesystem> =
        (0..members).map(|m| zone.open(zone.join(m)?)).collect::<Result<_, String>>()?;
    let takers = handles
        .iter()
        .enumerate()
        .map(|(m, fs)| Taker { name: format!("member {m}"), tree: fs, maps: false })
        .collect();
    let root = Spot { ino: ROOT, path: None };
    Turns::new(seed, Model::new(root, None, "", Reach::Core), takers).run(operations)?;
    drop(handles);
    zone.check()?;
    Ok(format!("{operations} operations by {members} members: no difference, fsck finds nothing"))
}

/// Appends, creations of the same names and renames by several members at once.
pub fn at_once(seed: u64, mib: u64, seconds: u64) -> Result<String, String> {
    const MEMBERS: u32 = 3;
    let zone = Zone::new(mib)?;
    let handles: Vec<Filesystem> =
        (0..MEMBERS).map(|m| zone.open(zone.join(m)?)).collect::<Result<_, String>>()?;
    let (log, race) = {
        let fs = &handles[0];
        let text = |e: Errno| e.to_string();
        let log = fs.create(ROOT, Some(b"log"), &Create::mode(libc::S_IFREG | 0o644)).map_err(text)?;
        (log, fs.create(ROOT, Some(b"race"), &Create::mode(libc::S_IFDIR | 0o755)).map_err(text)?)
    };
    let end = Instant::now() + Duration::from_secs(seconds);
    let stop = AtomicBool::new(false);
    let won: Vec<AtomicU64> = (0..4096).map(|_| AtomicU64::new(0)).collect();
    let appended = AtomicU64::new(0);
    let records = AtomicU64::new(0);
    let work = |who: u32, fs: &Filesystem| -> Result<(), String> {
        let mut rng = Rng(seed ^ u64::from(who));
        let mut next = 0;
        while Instant::now() < end && !stop.load(Ordering::Relaxed) {
            // A record: its writer, its number, its length, and that many bytes.
            let len = 8 + rng.below(9000) as usize;
            let mut record = vec![who as u8 + 1; len];
            record[0..4].copy_from_slice(&(len as u32).to_le_bytes());
            record[4] = who as u8 + 1;
            if appended.load(Ordering::Relaxed) < (mib << 20) / 4 {
                let put = fs.append(log, &record, false).map_err(|e| format!("append: {e}"))?;
                if put.0 != len {
                    return Err(format!("append: {} of {len} bytes", put.0));
                }
                appended.fetch_add(len as u64, Ordering::Relaxed);
                records.fetch_add(1, Ordering::Relaxed);
            }
            if next < won.len() {
                let name = format!("name-{next}");
                match fs.create(race, Some(name.as_bytes()), &Create::mode(libc::S_IFREG | 0o600)) {
                    Ok(_) => {
                        won[next].fetch_add(1, Ordering::Relaxed);
                    }
                    Err(Errno::EXIST) => {}
                    Err(e) => return Err(format!("create: {e}")),
                }
                fs.lookup(race, name.as_bytes()).map_err(|e| format!("{name}: just made, now {e}"))?;
                next += 1;
            }
            let (a, b) = (format!("m{who}-a"), format!("m{who}-b"));
            match fs.create(ROOT, Some(a.as_bytes()), &Create::mode(libc::S_IFREG | 0o600)) {
                Ok(_) | Err(Errno::EXIST) => {}
                Err(e) => return Err(format!("create {a}: {e}")),
            }
            fs.rename((ROOT, a.as_bytes()), (race, b.as_bytes()), 0)
                .map_err(|e| format!("rename {a}: {e}"))?;
            fs.unlink(race, b.as_bytes(), None).map_err(|e| format!("unlink {b}: {e}"))?;
        }
        Ok(())
    };
    let results: Vec<Result<(), String>> = std::thread::scope(|scope| {
        // Two threads of each member.
        let threads: Vec<_> = (0..MEMBERS * 2)
            .map(|t| {
                let (work, fs) = (&work, &handles[(t % MEMBERS) as usize]);
                let who = if t < MEMBERS { t } else { t + 8 };
                let stop = &stop;
                scope.spawn(move || {
                    let result = work(who, fs);
                    if result.is_err() {
                        stop.store(true, Ordering::Relaxed);
                    }
                    result
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap_or_else(|_| Err("a thread panicked".into()))).collect()
    });
    results.into_iter().collect::<Result<(), String>>()?;
    if let Some(twice) = won.iter().position(|n| n.load(Ordering::Relaxed) > 1) {
        return Err(format!("name-{twice} was created more than once"));
    }
    let seen = read_records(&handles[1], log)?;
    if seen != records.load(Ordering::Relaxed) {
        return Err(format!("{seen} records in the log, {} were appended", records.load(Ordering::Relaxed)));
    }
    drop(handles);
    zone.check()?;
    Ok(format!("{seen} records by {MEMBERS} members with two threads each: all whole, one winner per name"))
}

fn read_records(fs: &Filesystem, log: Handle) -> Result<u64, String> {
    let mut data = vec![0; fs.size(log) as usize];
    let n = fs.pread(log, &mut data, 0).map_err(|e| e.to_string())?;
    let mut rest = &data[..n];
    let mut records = 0;
    while let Some(head) = rest.get(0..5) {
        let len = u32::from_le_bytes([head[0], head[1], head[2], head[3]]) as usize;
        let record = rest.get(..len).filter(|r| r.len() >= 8).ok_or("a record is cut off")?;
        if record[5..].iter().any(|b| *b != head[4]) {
            return Err(format!("record {records} is mixed with another"));
        }
        rest = &rest[len..];
        records += 1;
    }
    if rest.is_empty() { Ok(records) } else { Err("bytes after the last record".into()) }
}
