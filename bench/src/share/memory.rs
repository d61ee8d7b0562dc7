// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Memory of the host that VMs take up: the proportional set sizes (PSS) of their processes. A page that several of them map counts once in
//! the sum, and what other programs of the host do does not count at all.

use std::collections::BTreeMap;
use std::fs;

use anyhow::{Context, Result};

/// MiB of the processes `roots` and of all that descend from them.
pub fn mib(roots: &[u32]) -> Result<f64> {
    let parents = parents()?;
    let mut kib = 0;
    for pid in parents.keys().filter(|pid| descends(**pid, roots, &parents)) {
        // A process that has ended meanwhile has no memory.
        let Ok(rollup) = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")) else { continue };
        kib += pss_kib(&rollup).with_context(|| format!("/proc/{pid}/smaps_rollup names no Pss"))?;
    }
    Ok(kib as f64 / 1024.0)
}

/// The parent of each process.
fn parents() -> Result<BTreeMap<u32, u32>> {
    let entries = fs::read_dir("/proc").context("can't read /proc")?;
    let pids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok());
    Ok(pids
        .filter_map(|pid| Some((pid, parent(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)?)))
        .collect())
}

/// The parent in a text of /proc/PID/stat. The second field is a name in brackets, which may have any character.
fn parent(stat: &str) -> Option<u32> {
    stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()
}

fn descends(pid: u32, roots: &[u32], parents: &BTreeMap<u32, u32>) -> bool {
    let mut at = Some(pid);
    while let Some(pid) = at {
        if roots.contains(&pid) {
            return true;
        }
        at = parents.get(&pid).copied();
    }
    false
}

fn pss_kib(rollup: &str) -> Option<u64> {
    let line = rollup.lines().find_map(|line| line.strip_prefix("Pss:"))?;
    line.trim().strip_suffix(" kB")?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_counts_with_its_descendants() {
        let parents = BTreeMap::from([(1, 0), (5, 1), (6, 5), (7, 1)]);
        let counted = |roots: &[u32]| parents.keys().filter(|pid| descends(**pid, roots, &parents)).count();
        assert_eq!([counted(&[5]), counted(&[5, 6]), counted(&[1]), counted(&[9])], [2, 2, 4, 0]);
    }

    #[test]
    fn a_parent_is_found_behind_any_name() {
        assert_eq!(parent("12 (a) b) S 7 12 12"), Some(7));
    }

    #[test]
    fn this_process_has_memory() {
        let own = mib(&[std::process::id()]).unwrap();
        assert!(own > 0.5, "{own} MiB");
        assert_eq!(pss_kib("Rss:  9 kB\nPss:      1504 kB\nPss_Dirty: 2 kB\n"), Some(1504));
    }
}
