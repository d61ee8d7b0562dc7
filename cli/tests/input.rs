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
        .env("TOMBOLO_ACCEL", "tcg")
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
