// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Bad input: one message that names file, key or remedy, an exit code that is not zero, and nothing left running.

use std::process::{Command, Output, Stdio};

fn tombolo(compose: &str, args: &[&str]) -> (Output, String, tempfile::TempDir) {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("tombolo.toml"), compose).unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_tombolo"))
        .args(args)
        .current_dir(dir.path())
        .env("XDG_RUNTIME_DIR", dir.path())
        .env("TOMBOLO_HYPERVISOR", "tcg")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let err = String::from_utf8_lossy(&output.stderr).into_owned();
    (output, err, dir)
}

#[test]
fn an_unknown_key_names_file_line_and_what_was_meant() {
    let (output, err, dir) = tombolo("[vm.a]\nmemroy = \"1G\"\n", &["up"]);
    assert_eq!(output.status.code(), Some(1));
    let file = dir.path().canonicalize().unwrap().join("tombolo.toml");
    assert_eq!(
        err,
        format!("tombolo: {}:2: unknown key 'memroy' in [vm.a]; did you mean 'memory'?\n", file.display())
    );
}

#[test]
fn a_missing_kernel_is_found_before_anything_is_started() {
    let (output, err, dir) = tombolo("[vm.a]\nkernel = \"/nonexistent/vmlinuz\"\n", &["up"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(err.contains("vm.a.kernel: /nonexistent/vmlinuz can't be read"), "{err}");
    assert!(!err.contains("starting"), "{err}");
    let left: Vec<_> =
        std::fs::read_dir(dir.path().join("tombolo")).unwrap().map(|e| e.unwrap().path()).collect();
    assert!(left.is_empty(), "left: {left:?}");
}

#[test]
fn too_little_memory_says_how_much_there_is() {
    let dir = tempfile::tempdir().unwrap();
    let kernel = dir.path().join("vmlinuz");
    std::fs::write(&kernel, "").unwrap();
    let compose = format!("[vm.a]\nmemory = \"900T\"\nkernel = \"{}\"\n", kernel.display());
    let (output, err, _dir) = tombolo(&compose, &["up"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(err.contains("too little memory") && err.contains("vm.a.memory with 900T"), "{err}");
    let (_, err, _dir) = tombolo("[vm.a]\nmemory = \"64M\"\n", &["up"]);
    assert!(err.contains(":2: vm.a.memory is 64M; a guest needs at least 128M"), "{err}");
}

/// A folder with a kernel that is none, the compose file of a VM that would boot it, and a zone's file with a file system.
fn persisted() -> (tempfile::TempDir, String, std::path::PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let (kernel, image) = (dir.path().join("vmlinuz"), dir.path().join("z.zone"));
    std::fs::write(&kernel, "").unwrap();
    let compose = format!(
        "[zone.z]\nsize = \"16M\"\nfiles = true\nbacking = \"{}\"\n[vm.a]\nkernel = \"{}\"\nzones = {{ z = {{ mount = \"/mnt\" }} }}\n",
        image.display(),
        kernel.display()
    );
    let image_name = image.to_str().unwrap();
    for args in [&["zone", "create", image_name, "--size", "16M"][..], &["files", "mkfs", image_name]] {
        let (output, err, _dir) = tombolo("", args);
        assert!(output.status.success(), "{err}");
    }
    (dir, compose, image)
}

/// Sets the version that follows `magic` in the zone's file to one of the future.
fn age(image: &std::path::Path, magic: &[u8]) {
    let mut bytes = std::fs::read(image).unwrap();
    let at = bytes.windows(magic.len()).position(|w| w == magic).unwrap() + magic.len();
    assert_eq!(bytes[at..at + 4], 1u32.to_le_bytes(), "the version of today");
    bytes[at..at + 4].copy_from_slice(&77u32.to_le_bytes());
    std::fs::write(image, bytes).unwrap();
}

#[test]
fn a_zone_of_another_version_is_refused_before_anything_is_started() {
    let (_dir, compose, image) = persisted();
    age(&image, b"TOMBZONE");
    let (output, err, _dir) = tombolo(&compose, &["up"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        err.contains("zone.z.backing: ") && err.contains("format version 77; this program knows"),
        "{err}"
    );
    assert!(err.contains("use the version of tombolo that made it") && !err.contains("starting"), "{err}");
}

#[test]
fn a_file_system_of_another_version_is_refused_before_anything_is_started() {
    let (_dir, compose, image) = persisted();
    age(&image, b"TMBOLOFS");
    let (output, err, _dir) = tombolo(&compose, &["up"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(err.contains("zone.z.files: z: the file system is of another version"), "{err}");
    assert!(err.contains("use the program that made it") && !err.contains("starting"), "{err}");
    let image = image.to_str().unwrap();
    let (output, err, _dir) = tombolo("", &["files", "fsck", image]);
    assert_eq!(output.status.code(), Some(8), "not checked");
    assert!(err.contains(image) && err.contains("version 77") && err.contains("use the program"), "{err}");
}

#[test]
fn mkfs_overwrites_a_file_system_only_with_force() {
    let (_dir, _, image) = persisted();
    // From its superblock on: before it stands who is looking at the zone.
    let files = |bytes: Vec<u8>| {
        let at = bytes.windows(8).position(|w| w == b"TMBOLOFS").unwrap();
        bytes[at..].to_vec()
    };
    let before = files(std::fs::read(&image).unwrap());
    let image_name = image.to_str().unwrap();
    let (output, err, _dir) = tombolo("", &["files", "mkfs", image_name]);
    assert_eq!(output.status.code(), Some(1));
    assert!(err.contains(image_name) && err.contains("--force overwrites it"), "{err}");
    assert!(files(std::fs::read(&image).unwrap()) == before, "nothing was written");
    let (output, err, _dir) = tombolo("", &["files", "mkfs", "--force", image_name]);
    assert!(output.status.success(), "{err}");
}

#[test]
fn huge_pages_that_are_not_reserved_are_named_with_where_to_reserve_them() {
    let dir = tempfile::tempdir().unwrap();
    let kernel = dir.path().join("vmlinuz");
    std::fs::write(&kernel, "").unwrap();
    let compose = format!(
        "[zone.z]\nsize = \"16T\"\nbacking = \"hugetlb\"\n[vm.a]\nkernel = \"{}\"\nzones = {{ z = {{}} }}\n",
        kernel.display()
    );
    let (output, err, _dir) = tombolo(&compose, &["up"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(err.contains("zone.z.backing: ") && err.contains("hugepages-2048kB/nr_hugepages"), "{err}");
    assert_eq!(err.matches("os error").count(), 1, "said once: {err}");
    assert!(!err.contains("starting"), "{err}");
}

#[test]
fn a_zone_that_is_neither_file_nor_running_is_named() {
    for (args, code) in [(&["files", "df", "shared"][..], 1), (&["files", "fsck", "shared"][..], 8)] {
        let (output, err, _dir) = tombolo("[vm.a]\n", args);
        assert_eq!(output.status.code(), Some(code));
        assert!(err.contains("'shared' is no file here, and no zone of a running project"), "{err}");
        assert!(err.contains("start it with 'tombolo up'"), "{err}");
    }
}

#[test]
fn a_file_that_is_no_compose_file_is_named_with_its_line_in_one_line() {
    let (output, err, dir) = tombolo("[vm.a]\n[vm.b\n", &["up"]);
    assert_eq!(output.status.code(), Some(1));
    let file = dir.path().canonicalize().unwrap().join("tombolo.toml");
    assert!(err.starts_with(&format!("tombolo: {}:2: ", file.display())), "{err}");
    assert_eq!(err.lines().count(), 1, "{err}");
}

#[test]
fn a_command_on_what_is_not_up_says_so() {
    for (args, code) in [(&["exec", "a", "--", "true"][..], 125), (&["console", "a"][..], 1)] {
        let (output, err, _dir) = tombolo("[vm.a]\n", args);
        assert_eq!(output.status.code(), Some(code));
        assert!(err.contains("is not up; start it with 'tombolo up'"), "{err}");
    }
    let (output, _, _dir) = tombolo("[vm.a]\n", &["down"]);
    assert!(output.status.success(), "down of what is not up is done already");
}

#[test]
fn a_vm_that_is_not_declared_is_named_with_the_one_that_was_meant() {
    let (output, err, _dir) = tombolo("[vm.alpha]\n", &["up", "alhpa"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(err.contains("declares no VM 'alhpa'; did you mean 'alpha'?"), "{err}");
    let (_, err, _dir) = tombolo("", &["up"]);
    assert!(err.contains("declares no VM; add a table [vm.NAME]"), "{err}");
}

#[test]
fn wrong_usage_has_a_code_of_its_own() {
    let (output, err, _dir) = tombolo("", &["up", "--nonsense"]);
    assert_eq!(output.status.code(), Some(2), "{err}");
}
