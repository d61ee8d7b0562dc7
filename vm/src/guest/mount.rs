// SPDX-License-Identifier: Apache-2.0 OR MIT
//! File systems of zones in a guest: mounted and unmounted by its agent.

use std::time::Duration;

use crate::guest::agent::Calls;
use crate::guest::exec;
use crate::machine::Machine;

/// Functions for scripts in a guest. `need_module` loads the module, or ends the script with 3 and says the kernel's release; `await_zone`
/// waits for the zone whose identity $1 is, since a device that has just come takes the guest a moment.
pub const FUNCTIONS: &str = r#"need_module() {
	grep -qw tombolo /proc/filesystems && return
	modprobe tombolo || insmod "/lib/modules/$(uname -r)/updates/dkms/tombolo.ko" || insmod /lib/modules/tombolo.ko
	grep -qw tombolo /proc/filesystems || { uname -r; exit 3; }
}
# The identity stands in the zone's header.
zone_is_there() {
	for pmem in /dev/pmem*; do
		[ -b "$pmem" ] && [ "$(od -An -tx1 -j16 -N16 "$pmem" | tr -d ' \n')" = "$1" ] && return
	done
	return 1
}
await_zone() {
	looks=0
	until zone_is_there "$1" || [ "$looks" -ge 200 ]; do
		looks=$((looks + 1))
		sleep 0.1
	done
}
# The module's own words, which programs may not have.
module_said() {
	dmesg | sed -n 's/.*\(tombolo: .*\)/\1/p' | tail -n 1 >&2
}
"#;

/// A file system that a guest mounts.
#[derive(Clone, Debug)]
pub struct Source {
    pub uuid: String,
    /// The slot that is kept for the guest.
    pub member: u32,
}

/// The options of a mount. Files of a zone are made by every member's root, who must not become root in this guest with them.
fn options(source: &Source, read_only: bool, more: &[String]) -> String {
    let mut all = vec!["nosuid", "nodev"];
    all.extend(more.iter().map(String::as_str));
    if read_only {
        all.push("ro");
    }
    format!("{},member={}", all.join(","), source.member)
}

/// Mounts a zone's file system through the agent, with these options of mount(8) besides.
///
/// # Errors
/// Says whether the module or the mount is missing.
pub fn mount(
    machine: &Machine,
    zone: &str,
    source: &Source,
    path: &str,
    read_only: bool,
    more: &[String],
) -> anyhow::Result<()> {
    const MOUNT: &str = r#"need_module
await_zone "$4"
mkdir -p "$2" && mount -t tombolo -o "$3" "$1" "$2" && exit
code=$?
module_said
exit $code"#;
    let name = machine.name();
    let identity = source.uuid.replace('-', "");
    let options = options(source, read_only, more);
    let output = exec::script(
        machine.agent(),
        &format!("{FUNCTIONS}{MOUNT}"),
        &[&source.uuid, path, &options, &identity],
        Duration::from_secs(120),
    )?;
    match output.code {
        0 => Ok(()),
        3 => anyhow::bail!(
            "the VM '{name}' is a guest without the module: its kernel {} knows no file system 'tombolo', so the zone '{zone}' \
             can't be mounted on {path}; use the guest kit, install tombolo-dkms in the image, or leave out 'mount'",
            output.out.trim()
        ),
        code => anyhow::bail!(
            "the VM '{name}' can't mount the zone '{zone}' on {path} (code {code}): {}",
            output.err.trim().replace('\n', "; ")
        ),
    }
}

/// Unmounts the zones whose identities are its arguments. The last mount comes first, which may lie in another one; umount(8) would take away what covers
/// a mount. Blanks, newlines and backslashes stand in a path of /proc/mounts as a backslash and an octal number, and busybox's awk parts fields at a
/// carriage return, too, unless it is told the blank.
const UNMOUNT: &str = r#"for source; do
	awk -F '[ ]' -v s="$source" '{ path[NR] = $2; own[NR] = $3 == "tombolo" && $1 == s } END {
		for (i = NR; i > 0; i--) if (own[i]) print path[i], covered[path[i]] + 0; else covered[path[i]] = 1
	}' /proc/mounts | sed 's/\\\([0-7]\)/\\0\1/g' | while read -r path covered; do
		# A command substitution removes newlines at the end.
		path=$(printf %b. "$path")
		path=${path%.}
		[ "$covered" = 0 ] || { printf '%s: another file system is mounted over it; unmount that first\n' "$path" >&2; exit 1; }
		umount "$path" || exit 1
	done || code=1
done
exit ${code:-0}"#;

/// Unmounts what is mounted from these zones, within `limit`.
///
/// # Errors
/// When one is busy or another file system is mounted over it, or the agent does not answer.
pub fn unmount(agent: &impl Calls, vm: &str, sources: &[String], limit: Duration) -> anyhow::Result<()> {
    let sources: Vec<&str> = sources.iter().map(String::as_str).collect();
    let output = exec::script(agent, UNMOUNT, &sources, limit)?;
    if output.code != 0 {
        anyhow::bail!("the VM '{vm}' can't unmount the zone: {}", output.err.trim());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn set_id_bits_and_devices_count_in_a_guest_only_where_they_are_asked_for() {
        let source = Source { uuid: String::new(), member: 3 };
        assert_eq!(options(&source, true, &[]), "nosuid,nodev,ro,member=3");
        // The later one holds.
        let more = ["noatime".to_owned(), "suid".to_owned()];
        assert_eq!(options(&source, false, &more), "nosuid,nodev,noatime,suid,member=3");
    }

    /// Runs the script in each shell that guests have on these lines of /proc/mounts; returns its exit code and the paths that it unmounts.
    fn unmounted(mounts: &[(&str, &str, &str)]) -> (Option<i32>, Vec<String>) {
        let line = |(source, path, kind): &(&str, &str, &str)| format!("{source} {path} {kind} rw 0 0\n");
        let scratch = tempfile::tempdir().unwrap();
        let file = scratch.path().join("mounts");
        std::fs::write(&file, mounts.iter().map(line).collect::<String>()).unwrap();
        let umount = "umount() { printf '%s\\000' \"$1\"; }\n";
        let script = umount.to_owned() + &UNMOUNT.replace("/proc/mounts", file.to_str().unwrap());
        let mut results = [vec!["sh"], vec!["bash"], vec!["busybox", "sh"]].map(|shell| {
            let mut command = std::process::Command::new(shell[0]);
            let output = command.args(&shell[1..]).args(["-c", &script, "tombolo", "zone"]).output().unwrap();
            let out = String::from_utf8(output.stdout).unwrap();
            (output.status.code(), out.split_terminator('\0').map(str::to_owned).collect())
        });
        assert!(results.iter().all(|result| *result == results[0]), "{results:?}");
        std::mem::take(&mut results[0])
    }

    #[test]
    fn a_zone_is_unmounted_in_a_guest_by_any_path_the_last_mount_first() {
        let paths = [
            (r"/mnt/a\040b\011", "/mnt/a b\t"),
            (r"/mnt/ends\012\012", "/mnt/ends\n\n"),
            (r"/mnt/\134040\134c", r"/mnt/\040\c"),
            ("/mnt/\r\u{b}x\r", "/mnt/\r\u{b}x\r"),
            ("/mnt/-d*$HOME`x`'\"%s~", "/mnt/-d*$HOME`x`'\"%s~"),
            ("/mnt/\u{e9}", "/mnt/\u{e9}"),
        ];
        let mut mounts: Vec<_> = paths.iter().map(|(escaped, _)| ("zone", *escaped, "tombolo")).collect();
        mounts.extend([("other", "/mnt", "tombolo"), ("zone", "/tmp", "tmpfs")]);
        let expected = paths.iter().rev().map(|(_, path)| (*path).to_owned()).collect();
        assert_eq!(unmounted(&mounts), (Some(0), expected));
    }

    #[test]
    fn what_covers_a_zone_in_a_guest_is_not_unmounted_in_its_place() {
        let covered = [("zone", "/a", "tombolo"), ("zone", "/b", "tombolo"), ("other", "/a", "tmpfs")];
        assert_eq!(unmounted(&covered), (Some(1), vec!["/b".to_owned()]));
        let covering = [("other", "/a", "tmpfs"), ("zone", "/a", "tombolo"), ("zone", "/a", "tombolo")];
        assert_eq!(unmounted(&covering), (Some(0), vec!["/a".to_owned(); 2]));
    }
}
