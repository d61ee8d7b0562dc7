// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Folders of the host in a guest, over 9p: mounted by its agent, and told as there only where they are.

use std::time::Duration;

use crate::compose::Share;
use crate::guest::agent::Calls;
use crate::guest::exec;
use crate::project::control::ShareStatus;

/// Time for the guest for one folder.
const LIMIT: Duration = Duration::from_secs(60);
/// Code of [`MOUNT`] where the kernel has no 9p.
const NO_9P: i64 = 3;
/// $1: the tag; $2: where, or nothing to only look; $3: options.
const MOUNT: &str = r#"grep -qw 9p /proc/filesystems || modprobe 9p 2>/dev/null
modprobe 9pnet_virtio 2>/dev/null
grep -qw 9p /proc/filesystems || { uname -r; exit 3; }
[ "$2" ] || exit 0
mkdir -p "$2" && mount -t 9p -o "$3" "$1" "$2""#;

/// Mounts the folders that are to be mounted, and looks whether the guest could mount the others.
///
/// # Errors
/// Names the folder that can't be mounted, and the remedy.
pub fn mount(agent: &impl Calls, vm: &str, shares: &[Share]) -> anyhow::Result<Vec<ShareStatus>> {
    shares.iter().map(|share| mount_one(agent, vm, share)).collect()
}

fn mount_one(agent: &impl Calls, vm: &str, share: &Share) -> anyhow::Result<ShareStatus> {
    let options =
        if share.readonly { "trans=virtio,version=9p2000.L,ro" } else { "trans=virtio,version=9p2000.L" };
    let path = share.mount.as_deref().unwrap_or_default();
    let output = exec::script(agent, MOUNT, &[&share.tag, path, options], LIMIT)?;
    let kernel = output.out.trim();
    let lacks = format!(
        "the VM '{vm}' can't mount the folder '{}': its kernel {kernel} has no 9p, as Debian's cloud kernels; use the guest kit's kernel \
         general-6.12 or another with 9p, or put the files into a zone",
        share.tag
    );
    let state = match (output.code, &share.mount) {
        (0, Some(path)) => format!("mounted on {path}"),
        (0, None) => "offered".to_owned(),
        (NO_9P, None) => lacks,
        (NO_9P, Some(_)) => anyhow::bail!("{lacks}, or leave out 'mount'"),
        (code, _) => anyhow::bail!(
            "the VM '{vm}' can't mount the folder '{}' on {path} (code {code}): {}",
            share.tag,
            output.err.trim().replace('\n', "; ")
        ),
    };
    Ok(ShareStatus { tag: share.tag.clone(), path: share.path.clone(), there: output.code == 0, state })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    /// Runs the guest's script with these programs instead of the host's: code, output, and what `mount` was called with.
    fn guest(knows_9p: bool, path: &str) -> (Option<i32>, String, String) {
        let dir = tempfile::tempdir().unwrap();
        let program = |name: &str, text: &str| {
            let path = dir.path().join(name);
            std::fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        };
        program("grep", if knows_9p { "exit 0" } else { "exit 1" });
        program("modprobe", "exit 1");
        program("uname", "echo 6.1.0-cloud");
        program("mkdir", "exit 0");
        let called = dir.path().join("called");
        program("mount", &format!("echo \"$@\" >{}", called.display()));
        let mut command = std::process::Command::new("/bin/sh");
        command.args(["-c", MOUNT, "tombolo", "src", path, "trans=virtio"]).env("PATH", dir.path());
        let output = command.output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        (output.status.code(), text, std::fs::read_to_string(called).unwrap_or_default())
    }

    #[test]
    fn a_folder_is_mounted_or_offered_only_in_a_guest_with_9p() {
        assert_eq!(guest(true, "/mnt"), (Some(0), String::new(), "-t 9p -o trans=virtio src /mnt\n".into()));
        assert_eq!(guest(true, ""), (Some(0), String::new(), String::new()));
        assert_eq!(guest(false, "/mnt"), (Some(3), "6.1.0-cloud\n".into(), String::new()));
        assert_eq!(guest(false, ""), (Some(3), "6.1.0-cloud\n".into(), String::new()));
    }
}
