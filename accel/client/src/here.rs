// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tells the process that made a connection from one that was forked from it. A child has the parent's descriptors and would
//! talk in its name; the rings themselves aren't mapped in children (`Mapping::not_in_children`).

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

const PAGE: usize = 4096;

/// A word that the kernel clears in a child, however that was made.
pub(crate) struct Here(NonNull<AtomicU32>);

// SAFETY: an atomic in a page that lives as long as this value.
unsafe impl Send for Here {}
// SAFETY: as above.
unsafe impl Sync for Here {}

impl Here {
    /// This process.
    pub fn new() -> std::io::Result<Here> {
        let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a fresh page.
        let page = unsafe { libc::mmap(std::ptr::null_mut(), PAGE, access, flags, -1, 0) };
        if page == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error());
        }
        let word = NonNull::new(page.cast::<AtomicU32>()).ok_or(std::io::ErrorKind::OutOfMemory)?;
        let here = Here(word);
        // SAFETY: the page just mapped.
        if unsafe { libc::madvise(page, PAGE, libc::MADV_WIPEONFORK) } < 0 {
            return Err(std::io::Error::last_os_error());
        }
        here.word().store(1, Ordering::Relaxed);
        Ok(here)
    }

    fn word(&self) -> &AtomicU32 {
        // SAFETY: mapped until drop; zero is a number.
        unsafe { self.0.as_ref() }
    }

    /// Returns whether this is still that process.
    pub fn is_here(&self) -> bool {
        self.word().load(Ordering::Relaxed) != 0
    }
}

impl Drop for Here {
    fn drop(&mut self) {
        // SAFETY: mapped by new(), and this is the only user.
        unsafe { libc::munmap(self.0.as_ptr().cast(), PAGE) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_is_another_process() {
        let here = Here::new().expect("a page");
        // SAFETY: the child only looks at the word and leaves.
        let status = unsafe {
            match libc::fork() {
                0 => libc::_exit(i32::from(here.is_here())),
                child => {
                    let mut status = -1;
                    assert_eq!(libc::waitpid(child, &mut status, 0), child);
                    status
                }
            }
        };
        assert_eq!((status, here.is_here()), (0, true));
    }
}
