// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Archives and images that `tombolo files import` unpacks.

pub(super) mod image;
pub(super) mod stage;
pub(super) mod unpack;

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
    use std::path::{Path, PathBuf};

    use tar::{Builder, EntryType, Header};
    use tempfile::TempDir;

    use super::image::{Source, plain, source};
    use super::unpack::{Unpacker, set_mode};
    use crate::cli::Meter;

    fn header(kind: EntryType, mode: u32, size: u64) -> Header {
        let mut header = Header::new_ustar();
        header.set_entry_type(kind);
        header.set_mode(mode);
        header.set_size(size);
        header.set_mtime(7);
        let own = fs::metadata("/proc/self").unwrap();
        header.set_uid(own.uid().into());
        header.set_gid(own.gid().into());
        header
    }

    /// An archive of entries: `a/` is a folder, `a -> b` a link, `a = b` a file or a hard link of another one (`a = =b`).
    fn archive(entries: &[&str]) -> Vec<u8> {
        let mut tar = Builder::new(Vec::new());
        for entry in entries {
            if let Some((name, target)) = entry.split_once(" -> ") {
                tar.append_link(&mut header(EntryType::Symlink, 0o777, 0), name, target).unwrap();
            } else if let Some((name, target)) = entry.split_once(" = =") {
                tar.append_link(&mut header(EntryType::Link, 0o644, 0), name, target).unwrap();
            } else if let Some((name, data)) = entry.split_once(" = ") {
                let mut header = header(EntryType::Regular, 0o4751, data.len() as u64);
                tar.append_data(&mut header, name, data.as_bytes()).unwrap();
            } else {
                tar.append_data(&mut header(EntryType::Directory, 0o750, 0), entry, &b""[..]).unwrap();
            }
        }
        tar.into_inner().unwrap()
    }

    /// The layers on top of each other, in a folder beside which the file `outside` is.
    fn unpacked(layers: &[&[&str]]) -> (TempDir, PathBuf, anyhow::Result<()>) {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("root");
        fs::create_dir(&root).unwrap();
        fs::write(dir.path().join("outside"), "outside").unwrap();
        let mut unpacker = Unpacker::new(fs::File::open(&root).unwrap().into(), Meter::new(true));
        let done = layers.iter().try_for_each(|layer| unpacker.archive(&*archive(layer), true));
        (dir, root, done)
    }

    fn read(path: PathBuf) -> String {
        fs::read_to_string(path).unwrap()
    }

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<_> =
            fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn later_layers_replace_and_hide_what_earlier_ones_have() {
        let (_dir, root, done) = unpacked(&[
            &["a/", "a/keep = 1", "a/gone = 1", "b/x = 1", "b/sub/y = 1", "d = 1"],
            &[
                "a/",
                "a/.wh.gone",
                "a/new = 2",
                "b/sub/z = 2",
                "b/.wh..wh..opq",
                "d/",
                "d/in = 2",
                ".wh.never",
                "e = =a/keep",
            ],
        ]);
        done.unwrap();
        assert_eq!(names(&root.join("a")), ["keep", "new"]);
        assert_eq!(
            (names(&root.join("b")), names(&root.join("b/sub"))),
            (vec!["sub".into()], vec!["z".into()])
        );
        assert_eq!(read(root.join("d/in")), "2");
        assert_eq!(fs::metadata(root.join("e")).unwrap().nlink(), 2);
        let about = fs::metadata(root.join("a/new")).unwrap();
        assert_eq!((about.permissions().mode() & 0o7777, about.mtime()), (0o4751, 7));
        let about = fs::metadata(root.join("a")).unwrap();
        assert_eq!((about.permissions().mode() & 0o7777, about.mtime()), (0o750, 7));
    }

    #[test]
    fn links_of_an_archive_lead_to_nothing_outside_of_it() {
        let (dir, root, done) = unpacked(&[&[
            "run/",
            "var/run -> /run",
            "up -> ../..",
            "var/run/file = in",
            "up/file = top",
            "var/run/hard = =/up/file",
        ]]);
        done.unwrap();
        assert_eq!((read(root.join("run/file")), read(root.join("file"))), ("in".into(), "top".into()));
        assert_eq!(read(root.join("run/hard")), "top");
        for wrong in [["../file = x"], ["x/../../file = x"], ["x = =../outside"], [".wh... = "]] {
            let mut tar = Builder::new(Vec::new());
            // The crate would write no such name.
            let (name, data) = wrong[0].split_once(" = ").unwrap();
            let kind = if data.starts_with('=') { EntryType::Link } else { EntryType::Regular };
            let mut header = header(kind, 0o644, 0);
            header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
            if let Some(target) = data.strip_prefix('=') {
                header.as_old_mut().linkname[..target.len()].copy_from_slice(target.as_bytes());
            }
            header.set_cksum();
            tar.append(&header, &b""[..]).unwrap();
            let mut unpacker = Unpacker::new(fs::File::open(&root).unwrap().into(), Meter::new(true));
            assert!(unpacker.archive(&*tar.into_inner().unwrap(), true).is_err(), "{wrong:?}");
        }
        assert_eq!(
            (names(dir.path()), read(dir.path().join("outside"))),
            (vec!["outside".into(), "root".into()], "outside".into())
        );
    }

    #[test]
    fn an_archive_that_is_cut_short_is_refused() {
        let (_dir, root, done) = unpacked(&[]);
        done.unwrap();
        let whole = archive(&["a = 0123456789"]);
        let mut unpacker = Unpacker::new(fs::File::open(&root).unwrap().into(), Meter::new(true));
        assert!(unpacker.archive(&whole[..515], false).is_err());
    }

    #[test]
    fn sources_are_told_apart_and_what_is_none_is_refused_with_what_to_do() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let tar = archive(&["a = 1"]);
        fs::write(at("plain"), &tar).unwrap();
        fs::write(at("zstd"), zstd::encode_all(&*tar, 1).unwrap()).unwrap();
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        std::io::Write::write_all(&mut gzip, &tar).unwrap();
        fs::write(at("gzip"), gzip.finish().unwrap()).unwrap();
        for name in ["plain", "zstd", "gzip"] {
            assert!(matches!(source(&at(name)).unwrap(), Some(Source::Tar(_))), "{name}");
            let mut read = Vec::new();
            std::io::Read::read_to_end(&mut plain(&at(name)).unwrap(), &mut read).unwrap();
            assert!(read == tar, "{name}");
        }
        for (name, begin, why) in [
            ("qcow2", "QFI\u{fb}", "a disk image"),
            ("text", "hello", "neither"),
            ("xz", "\u{fd}7zXZ", "unxz"),
        ] {
            fs::write(at(name), begin.chars().map(|c| c as u8).collect::<Vec<_>>()).unwrap();
            let said = source(&at(name)).unwrap_err().to_string();
            assert!(said.contains(why), "{said}");
        }
        fs::write(at("saved"), archive(&["oci-layout = {}"])).unwrap();
        assert!(source(&at("saved")).unwrap_err().to_string().contains("unpack it"));
        fs::create_dir(at("folder")).unwrap();
        assert!(source(&at("folder")).unwrap().is_none());
    }

    #[test]
    fn the_layers_of_an_image_are_those_of_this_machines_manifest() {
        let dir = tempfile::tempdir().unwrap();
        let blobs = dir.path().join("blobs/sha256");
        fs::create_dir_all(&blobs).unwrap();
        fs::write(dir.path().join("oci-layout"), "{}").unwrap();
        let own = if cfg!(target_arch = "x86_64") { "amd64" } else { "arm64" };
        let put = |name: &str, text: &str| fs::write(blobs.join(name), text).unwrap();
        let index = |text: &str| fs::write(dir.path().join("index.json"), text).unwrap();
        let manifest = r#"{"layers":[{"digest":"sha256:l1","size":1},{"digest":"sha256:l2","size":2}]}"#;
        put("m", manifest);
        put("l1", "1");
        put("l2", "22");
        let list = |architectures: &[&str]| {
            let one = |a: &&str| {
                format!(
                    r#"{{"digest":"sha256:m","size":{},"platform":{{"architecture":"{a}","os":"linux"}}}}"#,
                    manifest.len()
                )
            };
            format!(r#"{{"manifests":[{}]}}"#, architectures.iter().map(one).collect::<Vec<_>>().join(","))
        };
        let nested = list(&["riscv64", own]);
        put("i", &nested);
        index(&format!(r#"{{"manifests":[{{"digest":"sha256:i","size":{}}}]}}"#, nested.len()));
        let Some(Source::Layers(layers)) = source(dir.path()).unwrap() else { panic!("no image") };
        assert_eq!(layers, [blobs.join("l1"), blobs.join("l2")]);
        for (text, why) in [
            (list(&["riscv64"]), "no image for linux/"),
            (list(&[own, own]), "2 images"),
            (r#"{"manifests":[{"digest":"sha256:../../m","size":1}]}"#.to_owned(), "digest"),
            (r#"{"manifests":[{"digest":"sha256:m","size":1}]}"#.to_owned(), "copy the image anew"),
        ] {
            index(&text);
            let said = format!("{:#}", source(dir.path()).unwrap_err());
            assert!(said.contains(why), "{said}");
        }
    }

    #[test]
    fn a_folder_with_a_link_of_a_guest_in_it_is_not_left() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("root");
        fs::create_dir_all(root.join("a")).unwrap();
        let mut unpacker = Unpacker::new(fs::File::open(&root).unwrap().into(), Meter::new(true));
        fs::remove_dir(root.join("a")).unwrap();
        symlink(dir.path(), root.join("a")).unwrap();
        assert!(unpacker.archive(&*archive(&["a/x = 1"]), false).is_err());
        assert_eq!(names(dir.path()), ["root"]);
    }

    #[test]
    fn a_link_that_a_guest_puts_in_the_place_of_a_new_device_node_gives_no_file_of_the_host_another_mode() {
        let dir = tempfile::tempdir().unwrap();
        let folder = std::os::fd::OwnedFd::from(fs::File::open(dir.path()).unwrap());
        let mode = |name: &str| fs::metadata(dir.path().join(name)).unwrap().permissions().mode() & 0o7777;
        fs::write(dir.path().join("outside"), "outside").unwrap();
        fs::set_permissions(dir.path().join("outside"), fs::Permissions::from_mode(0o600)).unwrap();
        symlink(dir.path().join("outside"), dir.path().join("null")).unwrap();
        assert!(set_mode(&folder, "null".as_ref(), rustix::fs::Mode::from_raw_mode(0o666)).is_err());
        assert_eq!(mode("outside"), 0o600);
        set_mode(&folder, "outside".as_ref(), rustix::fs::Mode::from_raw_mode(0o644)).unwrap();
        assert_eq!(mode("outside"), 0o644);
    }

    #[test]
    fn a_name_that_is_larger_than_memory_is_refused_before_it_is_read() {
        let (_dir, root, done) = unpacked(&[]);
        done.unwrap();
        let mut made = Header::new_gnu();
        made.set_entry_type(EntryType::GNULongName);
        made.set_size(1 << 40);
        made.set_cksum();
        let zeros = std::io::Read::chain(&made.as_bytes()[..], std::io::repeat(0));
        let mut unpacker = Unpacker::new(fs::File::open(&root).unwrap().into(), Meter::new(true));
        let said = format!("{:#}", unpacker.archive(zeros, false).unwrap_err());
        assert!(said.contains("headers of an entry"), "{said}");
    }

    #[test]
    fn a_path_through_a_parent_is_found_while_others_rename() {
        use std::sync::atomic::{AtomicBool, Ordering};
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (dir.path().join("a"), dir.path().join("b"));
        fs::write(&a, "").unwrap();
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    fs::rename(&a, &b).unwrap();
                    fs::rename(&b, &a).unwrap();
                }
            });
            let files: Vec<_> = (0..5000).map(|n| format!("x/link/{n} = 1")).collect();
            let mut entries = vec!["real/", "x/", "x/link -> ../real"];
            entries.extend(files.iter().map(String::as_str));
            let (_dir, root, done) = unpacked(&[&entries]);
            over.store(true, Ordering::Relaxed);
            done.unwrap();
            assert_eq!(names(&root.join("real")).len(), 5000);
        });
    }
}
