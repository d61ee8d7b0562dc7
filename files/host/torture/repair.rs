// SPDX-License-Identifier: Apache-2.0 OR MIT
//! How long recovery takes when all members died: a zone full of small files, each member in the middle of an
//! operation.

use std::time::Instant;

use rustix::io::Errno;
use tombolo_files::fs::{Create, ROOT};

use crate::zone::Zone;

const MEMBERS: u32 = 8;

/// Fills a zone of `mib` MiB, kills all members, and times recovery by the next one.
pub fn run(mib: u64) -> Result<String, String> {
    let zone = Zone::new(mib)?;
    let text = |what: &str, e: Errno| format!("{what}: {e}");
    let mut files = 0u64;
    for member in 1..=MEMBERS {
        let fs = zone.open(zone.join(member)?)?;
        let name = format!("of-{member}");
        let dir = fs.create(ROOT, Some(name.as_bytes()), &Create::mode(libc::S_IFDIR | 0o755));
        let dir = dir.map_err(|e| text("mkdir", e))?;
        // Open files without names, which only the dead kept.
        for _ in 0..100 {
            let file = Create { open: true, ..Create::mode(libc::S_IFREG | 0o600) };
            let ino = fs.create(dir, None, &file).map_err(|e| text("tmpfile", e))?;
            fs.pwrite(ino, &[1; 4096], 0, false).map_err(|e| text("write", e))?;
        }
        for i in 0.. {
            // Each leaves an equal part to the following ones.
            let share = u64::from(MEMBERS - member) * (mib << 8) / u64::from(MEMBERS);
            if i % 4096 == 0 && fs.statfs().blocks_free < share {
                break;
            }
            let file = Create { open: i % 16 == 0, ..Create::mode(libc::S_IFREG | 0o600) };
            let ino = fs.create(dir, Some(format!("file-{i}").as_bytes()), &file);
            match ino.and_then(|ino| fs.pwrite(ino, &[2; 4096], 0, false)) {
                Ok(_) => files += 1,
                Err(Errno::NOSPC) => break,
                Err(e) => return Err(text("create", e)),
            }
        }
        fs.abandon();
    }
    (1..=MEMBERS).try_for_each(|member| zone.declare_dead(member))?;
    let began = Instant::now();
    let fs = zone.open(zone.join(0)?)?;
    fs.recover_all().map_err(|e| text("recovery", e))?;
    let took = began.elapsed();
    drop(fs);
    zone.check()?;
    let per_gib = took.as_secs_f64() * 1024.0 / mib as f64;
    Ok(format!(
        "{mib} MiB, {files} files, {MEMBERS} members dead: repaired in {} ms, {:.0} ms per GiB; fsck finds nothing",
        took.as_millis(),
        per_gib * 1000.0
    ))
}
