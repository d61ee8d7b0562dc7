// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Errors: what, where, and the remedy if there is one.

use std::io;

/// An error about a zone.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The operating system refused.
    #[error("{what}: {cause}")]
    Io {
        /// The failed operation, with the path.
        what: String,
        /// The system's error; not a `source`, which a chain of errors would print twice.
        cause: io::Error,
    },
    /// The memory does not hold a zone.
    #[error("{zone}: not a zone: {why}")]
    NotAZone {
        /// Path or name.
        zone: String,
        /// The contents found.
        why: String,
    },
    /// A file whose pages another process or machine delivers.
    #[error(
        "{zone}: a zone can't lie in a file of {kind}, whose pages may never come; use tmpfs (/dev/shm), a DAX file system or a disk of this host"
    )]
    NotMemory {
        /// Path or name.
        zone: String,
        /// The kind of file system.
        kind: String,
    },
    /// A zone of another version, or with features that this program doesn't know.
    #[error("{zone}: {why}; use the version of tombolo that made it, or create the zone anew")]
    Unsupported {
        /// Path or name.
        zone: String,
        /// The version or feature.
        why: String,
    },
    /// A zone whose header contradicts itself.
    #[error("{zone}: damaged header: {why}")]
    Damaged {
        /// Path or name.
        zone: String,
        /// The field and its value.
        why: String,
    },
    /// A configuration that can't be.
    #[error("zone {zone}: {why}")]
    Config {
        /// The zone's name.
        zone: String,
        /// The fault, and the remedy.
        why: String,
    },
    /// A process uses the zone.
    #[error("{zone}: in use by {by}; stop it first")]
    InUse {
        /// Path or name.
        zone: String,
        /// Owner or members.
        by: String,
    },
    /// The requested area is missing.
    #[error("zone {zone} has no {kind} area{name}")]
    NoArea {
        /// The zone's name.
        zone: String,
        /// The type's name.
        kind: String,
        /// ` named …`, or empty.
        name: String,
    },
    /// A member can't do the operation, or it can't be done to the member.
    #[error("zone {zone}: member {member}: {why}")]
    Member {
        /// The zone's name.
        zone: String,
        /// Name or number.
        member: String,
        /// The state or the rule that forbids it, as a clause.
        why: String,
    },
    /// An access outside of the mapped memory, or a write to a read-only mapping.
    #[error("zone memory: {0}")]
    Access(String),
}

impl Error {
    /// Wraps the last operating system error.
    pub fn last_os(what: impl Into<String>) -> Self {
        Error::io(what, io::Error::last_os_error())
    }

    /// Wraps an I/O error.
    pub fn io(what: impl Into<String>, cause: io::Error) -> Self {
        Error::Io { what: what.into(), cause: with_remedy(cause) }
    }
}

/// An error of the system; the remedy goes with one that a limit of the process explains.
fn with_remedy(cause: io::Error) -> io::Error {
    if cause.raw_os_error() == Some(libc::EFBIG) {
        let text =
            format!("{cause}; raise the limit on the size of files (ulimit -f, LimitFSIZE= of the unit)");
        return io::Error::new(cause.kind(), text);
    }
    cause
}
