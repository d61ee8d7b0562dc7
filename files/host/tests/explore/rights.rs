// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The mode of a file and its access ACL: each change of one is a change of the other.

use tombolo_files::fs::{Attr, Filesystem};
use tombolo_files::sys;

use crate::cases::{at, doing, recover, setup};
use crate::{Case, Doing};

const ACCESS: &[u8] = b"system.posix_acl_access";
const OTHER: &[u8] = b"user.a";
/// The tags of an ACL's owner, mask and others.
const OWNER: u16 = 1;
const MASK: u16 = 16;
const OTHERS: u16 = 32;

/// An ACL with a named user for a file with this mode.
fn acl(mode: u32) -> Vec<u8> {
    let bits = |shift: u32| (mode >> shift & 7) as u16;
    let entries =
        [(OWNER, bits(6), !0), (2, 6, 1000u32), (4, 5, !0), (MASK, bits(3), !0), (OTHERS, bits(0), !0)];
    let mut value = 2u32.to_le_bytes().to_vec();
    for (tag, permissions, id) in entries {
        value.extend(tag.to_le_bytes().into_iter().chain(permissions.to_le_bytes()).chain(id.to_le_bytes()));
    }
    value
}

fn set_acl(fs: &Filesystem, mode: u32) -> Result<(), String> {
    let file = at(fs, "a/g").map_err(|e| e.to_string())?;
    let done = fs.xattr_set(file, ACCESS, Some(&acl(mode)), 0, Some(mode));
    done.map_err(|e| format!("setfacl {mode:o}: {e}"))
}

fn chmod(fs: &Filesystem, mode: u32) -> Result<(), String> {
    let file = at(fs, "a/g").map_err(|e| e.to_string())?;
    let done = fs.setattr(file, sys::TFS_SET_MODE, &Attr { mode, ..Attr::default() });
    done.map_err(|e| format!("chmod {mode:o}: {e}"))
}

/// The ACL is that of the mode, which is one of these, and the other attribute is as it was.
fn agree(fs: &Filesystem, modes: &[u32]) -> Result<(), String> {
    let file = at(fs, "a/g").map_err(|e| e.to_string())?;
    let mode = fs.getattr(file).map_err(|e| format!("attributes: {e}"))?.mode & 0o7777;
    let found = fs.xattr_get(file, ACCESS).map_err(|e| format!("the ACL: {e}"))?;
    if !modes.contains(&mode) || found != acl(mode) {
        return Err(format!("mode {mode:o}, {found:?}"));
    }
    match fs.xattr_get(file, OTHER) {
        Ok(value) if value == [1; 6000] => Ok(()),
        other => Err(format!("the other attribute: {:?}", other.map(|value| value.len()))),
    }
}

#[test]
fn a_mode_and_its_acl_agree_whoever_changes_them_and_dies() {
    let case = Case {
        setup: |fs| {
            setup(fs);
            set_acl(fs, 0o640).expect("an ACL");
        },
        doing: vec![
            doing(4, true, |fs| chmod(fs, 0o4715)),
            doing(20, true, |fs| set_acl(fs, 0o750)),
            Doing { after: Some(0), ..doing(1, true, recover) },
            Doing { after: Some(2), ..doing(2, false, recover) },
            Doing { after: Some(2), ..doing(12, false, |fs| chmod(fs, 0o701)) },
        ],
        check: |fs, done| agree(fs, if done[4] { &[0o701, 0o750] } else { &[0o640, 0o4715, 0o750] }),
    };
    case.explore("mode and ACL");
}
