// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The CD that Bochs boots and that is the lab's root file system: isolinux, kernel and initramfs beside the files that the lab is
//! given (ISO 9660 with Rock Ridge). genisoimage reads them from where they are; only folders and links are made for it.

use std::fmt::Write;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use crate::bochs::Bochs;
use crate::cache::output;
use crate::carry::{Carried, skeleton};

/// The CD, in the lab's folder.
pub const NAME: &str = "lab.iso";

/// The configuration of isolinux: the kernel that it starts.
pub struct Boot<'a> {
    pub kernel: &'a Path,
    pub initramfs: &'a Path,
    /// The kernel's arguments.
    pub arguments: &'a str,
}

/// Writes the CD into the lab's folder.
pub fn write(bochs: &Bochs, folder: &Path, boot: &Boot<'_>, carried: &Carried) -> Result<()> {
    let stage = folder.join("stage");
    skeleton(&stage, carried)?;
    let loader = stage.join("isolinux");
    fs::create_dir(&loader)?;
    // genisoimage writes where its blocks are into this copy.
    let from = bochs.file("usr/lib/ISOLINUX/isolinux.bin");
    fs::copy(&from, loader.join("isolinux.bin")).with_context(|| format!("copying {}", from.display()))?;
    fs::write(loader.join("isolinux.cfg"), isolinux_configuration(boot.arguments))?;
    let c32 = bochs.file("usr/lib/syslinux/modules/bios/ldlinux.c32");
    let list = folder.join("files");
    let mut text = String::new();
    for (place, source) in [
        (Path::new("isolinux/ldlinux.c32"), c32.as_path()),
        (Path::new("isolinux/vmlinuz"), boot.kernel),
        (Path::new("isolinux/initrd"), boot.initramfs),
    ]
    .into_iter()
    .chain(carried.entries())
    {
        writeln!(text, "{}={}", graft(place), graft(source))?;
    }
    writeln!(text, "/={}", graft(&stage))?;
    fs::write(&list, text)?;
    let mut command = bochs.program("genisoimage");
    command.args([
        "-quiet",
        "-input-charset",
        "utf-8",
        "-R",
        "-D",
        "-uid",
        "0",
        "-gid",
        "0",
        "-V",
        "tombolo-lab",
    ]);
    command.args([
        "-b",
        "isolinux/isolinux.bin",
        "-c",
        "isolinux/boot.cat",
        "-no-emul-boot",
        "-boot-load-size",
        "4",
        "-boot-info-table",
    ]);
    command.arg("-o").arg(folder.join(NAME)).arg("-graft-points").arg("-path-list").arg(&list);
    output(&mut command).context("writing the lab's CD")?;
    Ok(())
}

fn isolinux_configuration(arguments: &str) -> String {
    format!("default lab\nprompt 0\nlabel lab\nkernel vmlinuz\ninitrd initrd\nappend {arguments}\n")
}

/// A path as it stands on either side of a graft point.
fn graft(path: &Path) -> String {
    path.display().to_string().replace('\\', "\\\\").replace('=', "\\=")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_equals_sign_in_a_name_does_not_end_the_name() {
        assert_eq!(graft(Path::new("/a=b/c")), "/a\\=b/c");
    }
}
