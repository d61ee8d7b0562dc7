// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The core's interface and format as bindgen reads them from `files/core` and `zone/format`, and assertions that both
//! compilers laid them out alike.

#![allow(non_camel_case_types, non_upper_case_globals, non_snake_case, dead_code)]
#![allow(clippy::undocumented_unsafe_blocks, clippy::useless_transmute, clippy::ptr_offset_with_cast)]
#![allow(clippy::missing_safety_doc, clippy::too_many_arguments)]

include!(concat!(env!("OUT_DIR"), "/sys.rs"));

const _: () = {
    assert!(size_of::<tfs_super>() == 4096);
    assert!(core::mem::offset_of!(tfs_super, itable_root) == 192);
    assert!(core::mem::offset_of!(tfs_super, freeze) == 320);
    assert!(size_of::<tfs_inode>() == 256);
    assert!(core::mem::offset_of!(tfs_inode, root) == 64);
    assert!(core::mem::offset_of!(tfs_inode, atime) == 128);
    assert!(core::mem::offset_of!(tfs_inode, lock) == 192);
    assert!(size_of::<tfs_dirent>() == 64);
    assert!(size_of::<tfs_tx>() == 512);
    assert!(core::mem::offset_of!(tfs_tx, words) == 128);
    assert!(size_of::<tfs_member_area>() == 40960);
    assert!(size_of::<tmb_member>() == 256);
    assert!(size_of::<tmb_zone_header>() == 4096);
    assert!(size_of::<tmb_area>() == 64);
};
