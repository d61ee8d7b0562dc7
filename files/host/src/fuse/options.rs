// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Mount options, as mount(8) has them. Set-id bits and devices are ignored by default: every VM's root can make them in a zone, and must not
//! become root of this host by them.

use crate::fs::Attr;

/// When reads store the time of the access.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AccessTimes {
    /// relatime: if the file has changed since the last one, or that is a day old.
    #[default]
    Relative,
    /// strictatime
    Always,
    /// noatime
    Never,
}

impl AccessTimes {
    const DAY: i64 = 24 * 60 * 60 * 1_000_000_000;

    /// Returns whether an access at `now` is stored.
    pub fn is_due(self, attr: &Attr, now: i64) -> bool {
        let changed = attr.atime <= attr.mtime || attr.atime <= attr.ctime;
        match self {
            AccessTimes::Relative => changed || now.saturating_sub(attr.atime) >= AccessTimes::DAY,
            AccessTimes::Always => true,
            AccessTimes::Never => false,
        }
    }
}

/// The options of a mount.
#[derive(Clone, Debug, Default)]
pub struct MountOptions {
    /// The source in the mount table.
    pub source: String,
    /// No writes.
    pub read_only: bool,
    /// Other users may use the mount (always so for root's mounts).
    pub allow_other: bool,
    /// Set-id bits and capabilities of programs are honoured.
    pub suid: bool,
    /// Device nodes can be opened.
    pub dev: bool,
    /// No program can be run.
    pub noexec: bool,
    /// When reads store the time of the access.
    pub access_times: AccessTimes,
    /// Reads of directories store none.
    pub nodiratime: bool,
}

impl MountOptions {
    /// Takes one option of `-o`.
    ///
    /// # Errors
    /// Lists the valid options.
    pub fn set(&mut self, option: &str) -> Result<(), String> {
        match option {
            "ro" => self.read_only = true,
            "rw" => self.read_only = false,
            "suid" => self.suid = true,
            "nosuid" => self.suid = false,
            "dev" => self.dev = true,
            "nodev" => self.dev = false,
            "exec" => self.noexec = false,
            "noexec" => self.noexec = true,
            "atime" | "relatime" => self.access_times = AccessTimes::Relative,
            "strictatime" => self.access_times = AccessTimes::Always,
            "noatime" => self.access_times = AccessTimes::Never,
            "diratime" => self.nodiratime = false,
            "nodiratime" => self.nodiratime = true,
            _ => {
                return Err(format!(
                    "'{option}' is no option of this mount; there are ro, rw, [no]suid, [no]dev, [no]exec, [no]atime, [no]diratime, relatime, strictatime"
                ));
            }
        }
        Ok(())
    }

    fn list(&self) -> [(bool, libc::c_ulong, &'static str); 7] {
        [
            (self.read_only, libc::MS_RDONLY, "ro"),
            (!self.suid, libc::MS_NOSUID, "nosuid"),
            (!self.dev, libc::MS_NODEV, "nodev"),
            (self.noexec, libc::MS_NOEXEC, "noexec"),
            (self.access_times == AccessTimes::Never, libc::MS_NOATIME, "noatime"),
            (self.access_times == AccessTimes::Always, libc::MS_STRICTATIME, "strictatime"),
            (self.nodiratime, libc::MS_NODIRATIME, "nodiratime"),
        ]
    }

    /// Flags of mount(2).
    pub fn flags(&self) -> libc::c_ulong {
        self.list().iter().filter(|(on, ..)| *on).fold(0, |flags, (_, flag, _)| flags | flag)
    }

    /// Flags of fsmount(2): MOUNT_ATTR_*, the first four of which are those of mount(2).
    pub fn attributes(&self) -> u64 {
        let flags = self.flags();
        let rest = [(libc::MS_NOATIME, 0x10), (libc::MS_STRICTATIME, 0x20), (libc::MS_NODIRATIME, 0x80)];
        rest.iter()
            .filter(|(flag, _)| flags & flag != 0)
            .fold(flags & 0xf, |all, (_, attribute)| all | attribute)
    }

    /// Returns the flags for fusermount3, each with a comma before it.
    pub fn text(&self) -> String {
        self.list().iter().filter(|(on, ..)| *on).map(|(_, _, name)| format!(",{name}")).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn set_id_bits_and_devices_count_only_where_they_are_asked_for() {
        let mut options = MountOptions::default();
        assert_eq!(options.flags(), libc::MS_NOSUID | libc::MS_NODEV);
        assert_eq!(options.text(), ",nosuid,nodev");
        for option in ["suid", "dev", "ro", "noatime"] {
            options.set(option).expect("an option");
        }
        assert_eq!(options.flags(), libc::MS_RDONLY | libc::MS_NOATIME);
        assert_eq!(options.attributes(), libc::MOUNT_ATTR_RDONLY | libc::MOUNT_ATTR_NOATIME);
        assert!(options.set("user_xattr").expect_err("no option").contains("[no]atime"));
    }
}
