// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The objects that are services, and those that are refused, with what their author is told.

mod common;

use std::fs;
use tombolo_service::image::Image;

/// Compiles a call with this body, and what stands before it; returns what the check says.
fn verdict(before: &str, body: &str, more: &[&str]) -> Result<Image, String> {
    let folder = tempfile::tempdir().expect("a folder");
    let source = folder.path().join("s.c");
    let text = format!(
        "#include <tombolo/service.h>\n{before}\nuint64_t f(const struct tombolo_visit *v, uint64_t a, uint64_t b, uint64_t c)\n\
         {{ (void)v, (void)a, (void)b, (void)c; {body} }}\nTOMBOLO_CALL(0, f);\n"
    );
    fs::write(&source, text).expect("written");
    Image::read(&common::compile(&source, folder.path(), more)).map_err(|e| e.to_string())
}

#[test]
fn the_example_is_a_service_whose_calls_stand_in_the_order_of_their_indices() {
    let folder = tempfile::tempdir().expect("a folder");
    let image = Image::read(&common::service("examples/kv.c", folder.path())).expect("a service");
    assert_eq!(image.calls.len(), 5);
    assert!(image.segments.iter().all(|s| !(s.write && s.execute)));
    assert!(image.segments.iter().any(|s| s.write), "it has data");
}

#[test]
fn instructions_that_leave_the_context_are_refused_by_name() {
    for (code, name) in [
        ("syscall", "syscall"),
        ("int $0x80", "int"),
        ("sysenter", "sysenter"),
        ("cpuid", "cpuid"),
        ("in $0x60, %al", "in"),
        ("outl %eax, %dx", "out"),
        ("vmcall", "vmcall"),
        ("hlt", "hlt"),
        ("wrfsbase %rax", "wrfsbase"),
        ("wrpkru", "wrpkru"),
        ("mov %eax, %fs", "mov"),
        ("xrstor (%rax)", "xrstor"),
        ("lretq", "retf"),
        ("rdmsr", "rdmsr"),
    ] {
        let why = verdict("", &format!("__asm__ volatile(\"{code}\"); return 0;"), &[]).expect_err(code);
        assert!(why.contains(&format!("`{name}`")), "{code}: {why}");
    }
}

#[test]
fn vmfunc_is_refused_also_inside_of_another_instruction() {
    let why = verdict("", "__asm__ volatile(\"vmfunc\"); return 0;", &[]).expect_err("refused");
    assert!(why.contains("`vmfunc`"), "{why}");
    let why = verdict("", "return a + 0x00d4010f;", &[]).expect_err("refused");
    assert!(why.contains("`vmfunc`") && why.contains("other bytes"), "{why}");
}

#[test]
fn addresses_in_data_are_refused_because_they_would_need_relocation() {
    let why = verdict("static int x; int *volatile p = &x;", "return *p;", &[]).expect_err("refused");
    assert!(why.contains("relocations"), "{why}");
}

#[test]
fn writable_code_and_a_service_without_calls_are_refused() {
    let why = verdict("", "return 0;", &["-Wl,-N"]).expect_err("refused");
    assert!(why.contains("writable and executable"), "{why}");
    let folder = tempfile::tempdir().expect("a folder");
    let source = folder.path().join("none.c");
    fs::write(&source, "int f(void); int f(void) { return 0; }\n").expect("written");
    let why = Image::read(&common::compile(&source, folder.path(), &[])).expect_err("refused").to_string();
    assert!(why.contains("TOMBOLO_CALL"), "{why}");
}

#[test]
fn whatever_bytes_an_object_is_cut_to_it_is_refused_and_nothing_panics() {
    let folder = tempfile::tempdir().expect("a folder");
    let bytes = fs::read(common::service("examples/kv.c", folder.path())).expect("read");
    for len in (0..bytes.len()).step_by(97) {
        assert!(Image::parse("cut", &bytes[..len]).is_err(), "{len} bytes");
    }
    for at in (0..bytes.len().min(0x400)).chain(0x2f00..0x3100) {
        let mut changed = bytes.clone();
        changed[at] ^= 0xff;
        let _any = Image::parse("changed", &changed);
    }
}
