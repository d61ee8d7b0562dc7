// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Which boot of the host this is: a VM that was let in before the host booted has ended, and nobody else needs to say so.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::sync::LazyLock;

use uuid::Uuid;

/// The number while it can't be told which boot this is.
const UNKNOWN: u32 = 1;

/// The present boot's number, if it can be told.
static BOOT: LazyLock<Option<u32>> = LazyLock::new(|| {
    let id = kernels_own(Path::new("/proc/sys/kernel/random/boot_id")).ok();
    id.and_then(|id| Uuid::parse_str(id.trim()).ok()).map(number_of)
});

/// Reads a file of procfs. LXC and systemd-nspawn mount a file of theirs over the kernel's, so that each start of a container looks like a boot.
fn kernels_own(path: &Path) -> io::Result<String> {
    let mut file = File::open(path)?;
    if rustix::fs::fstatfs(&file)?.f_type != libc::PROC_SUPER_MAGIC {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut text = String::new();
    file.read_to_string(&mut text)?;
    Ok(text)
}

/// 16 of the 122 random bits are enough: that two boots in a row have the same ones is no error, only a VM's end is not known by it then.
fn number_of(boot: Uuid) -> u32 {
    let (high, _) = boot.as_u64_pair();
    // The kinds of number that mean something else are two.
    ((high >> 48) as u32).max(UNKNOWN + 1)
}

/// A number of this boot, not 0.
pub(crate) fn number() -> u32 {
    BOOT.unwrap_or(UNKNOWN)
}

/// Returns whether it is known that this is the number of a boot before this one.
pub(crate) fn is_over(number: u32) -> bool {
    // The upper half is that of a session, where an earlier release has written it.
    number > UNKNOWN && BOOT.is_some_and(|boot| boot != number & 0xffff)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_another_boot_that_is_known_is_over() {
        assert!(number() > UNKNOWN);
        assert!([number(), UNKNOWN, 0, number() | 7 << 16].iter().all(|present| !is_over(*present)));
        assert!(is_over(number() ^ 2));
        assert_eq!(number_of(Uuid::nil()), 2);
    }

    #[test]
    fn the_boot_of_a_container_is_none() {
        let its_own = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(&its_own, Uuid::new_v4().to_string()).unwrap();
        assert!(kernels_own(its_own.path()).is_err());
        assert!(kernels_own(Path::new("/proc/sys/kernel/random/boot_id")).is_ok());
    }
}
