// SPDX-License-Identifier: Apache-2.0 OR MIT
//! POSIX ACLs: inheritance by new inodes, and how an ACL and the permission bits agree. Values have the format that the kernel
//! passes to and from file systems (`posix_acl_xattr.h`, version 2), under the names `system.posix_acl_access` and `…_default`;
//! so the kernel skin reads them as they are.

/// Attribute of the access ACL.
pub const ACCESS: &[u8] = b"system.posix_acl_access";
/// Attribute of the default ACL.
pub const DEFAULT: &[u8] = b"system.posix_acl_default";

const VERSION: u32 = 2;
const USER_OBJ: u16 = 0x01;
const USER: u16 = 0x02;
const GROUP_OBJ: u16 = 0x04;
const GROUP: u16 = 0x08;
const MASK: u16 = 0x10;
const OTHER: u16 = 0x20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry {
    tag: u16,
    perm: u16,
    id: u32,
}

/// A parsed ACL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Acl(Vec<Entry>);

impl Acl {
    /// Parses an attribute; None: it is not a well-formed ACL with its three base entries.
    pub fn parse(value: &[u8]) -> Option<Acl> {
        let (version, entries) = value.split_at_checked(4)?;
        if version != VERSION.to_le_bytes() || entries.len() % 8 != 0 {
            return None;
        }
        let entries: Vec<Entry> = entries
            .chunks_exact(8)
            .map(|e| Entry {
                tag: u16::from_le_bytes([e[0], e[1]]),
                perm: u16::from_le_bytes([e[2], e[3]]),
                id: u32::from_le_bytes([e[4], e[5], e[6], e[7]]),
            })
            .collect();
        let known = [USER_OBJ, USER, GROUP_OBJ, GROUP, MASK, OTHER];
        let ok = entries.iter().all(|e| known.contains(&e.tag) && e.perm <= 7);
        let acl = Acl(entries);
        (ok && [USER_OBJ, GROUP_OBJ, OTHER].iter().all(|tag| acl.find(*tag).is_some())).then_some(acl)
    }

    /// Returns the attribute's value.
    pub fn value(&self) -> Vec<u8> {
        let mut value = VERSION.to_le_bytes().to_vec();
        for e in &self.0 {
            value.extend_from_slice(&e.tag.to_le_bytes());
            value.extend_from_slice(&e.perm.to_le_bytes());
            value.extend_from_slice(&e.id.to_le_bytes());
        }
        value
    }

    fn find(&self, tag: u16) -> Option<usize> {
        self.0.iter().position(|e| e.tag == tag)
    }

    fn perm(&self, tag: u16) -> u32 {
        self.find(tag).map_or(0, |i| u32::from(self.0[i].perm))
    }

    /// Returns whether the permission bits alone express it.
    pub fn is_only_mode(&self) -> bool {
        self.0.len() == 3
    }

    /// Returns the permission bits that show with it: the group bits are the mask's, if it has one.
    pub fn mode(&self) -> u32 {
        let group = if self.find(MASK).is_some() { self.perm(MASK) } else { self.perm(GROUP_OBJ) };
        self.perm(USER_OBJ) << 6 | group << 3 | self.perm(OTHER)
    }

    /// Turns a default ACL into a new inode's access ACL: removes what the creator's mode doesn't have; returns the mode to use.
    pub fn create(&mut self, mode: u32) -> u32 {
        let group = self.find(MASK).or(self.find(GROUP_OBJ));
        for (i, perm) in [(self.find(USER_OBJ), mode >> 6), (group, mode >> 3), (self.find(OTHER), mode)] {
            if let Some(i) = i {
                self.0[i].perm &= (perm & 7) as u16;
            }
        }
        (mode & !0o777) | self.mode()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn acl(entries: &[(u16, u16, u32)]) -> Acl {
        Acl(entries.iter().map(|&(tag, perm, id)| Entry { tag, perm, id }).collect())
    }

    #[test]
    fn a_default_acl_replaces_the_umask() {
        let mut a =
            acl(&[(USER_OBJ, 7, !0), (USER, 7, 1000), (GROUP_OBJ, 5, !0), (MASK, 7, !0), (OTHER, 0, !0)]);
        assert_eq!(a.create(0o100666), 0o100660);
        assert_eq!(a.mode(), 0o660);
        assert_eq!(Acl::parse(&a.value()), Some(a));
    }

    #[test]
    fn malformed_acls_are_refused() {
        for bad in [&b""[..], b"\x02\0\0\0", b"\x01\0\0\0", b"\x02\0\0\0\x01\0\x07"] {
            assert_eq!(Acl::parse(bad), None);
        }
    }
}
