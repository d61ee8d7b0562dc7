// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Programs whose memory is limited: this test's own, started once more.

use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, Output, Stdio};

#[global_allocator]
static HEAP: tombolo_heap::Heap = tombolo_heap::Heap;

const LIMIT: u64 = 1 << 30;
const PART: &str = "TOMBOLO_HEAP_PART";

/// Runs a test of this file in a process of its own, which has the part to play there and little memory.
fn in_little_memory(test: &str) -> Output {
    let program = std::env::current_exe().expect("this program's file");
    let mut command = Command::new(program);
    command.args(["--exact", "--nocapture", test]).env(PART, test).env("RUST_BACKTRACE", "1");
    // SAFETY: between fork and exec, plain calls.
    unsafe {
        command.pre_exec(|| {
            let limit = libc::rlimit { rlim_cur: LIMIT, rlim_max: LIMIT };
            libc::setrlimit(libc::RLIMIT_AS, &limit);
            // No core files.
            let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
            libc::setrlimit(libc::RLIMIT_CORE, &none);
            Ok(())
        });
    }
    command.stdin(Stdio::null()).output().expect("the program starts")
}

fn is_part(test: &str) -> bool {
    std::env::var(PART).is_ok_and(|part| part == test)
}

#[test]
fn a_program_without_memory_ends_at_once_though_it_was_asked_for_backtraces() {
    let test = "a_program_without_memory_ends_at_once_though_it_was_asked_for_backtraces";
    if is_part(test) {
        let take = || loop {
            Box::leak(Box::new([1; 1000]));
        };
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(take);
            }
        });
    }
    let out = in_little_memory(test);
    let said = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.signal(), Some(libc::SIGABRT), "{said}");
    assert!(said.contains("tombolo: no memory for") && said.contains(" bytes"), "{said}");
    assert!(
        !said.contains("backtrace"),
        "it looked for names of functions, for which it had no memory: {said}"
    );
}

#[test]
fn a_buffer_that_is_not_had_is_no_end() {
    let test = "a_buffer_that_is_not_had_is_no_end";
    if !is_part(test) {
        let out = in_little_memory(test);
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        return;
    }
    assert_eq!(tombolo_heap::zeroed(2 * LIMIT as usize), None);
    assert_eq!(tombolo_heap::zeroed(usize::MAX), None);
    assert_eq!(tombolo_heap::zeroed(1 << 20), Some(vec![0; 1 << 20]));
}

#[test]
fn a_file_that_says_it_is_huge_is_an_error_and_no_end() {
    let test = "a_file_that_says_it_is_huge_is_an_error_and_no_end";
    if !is_part(test) {
        let out = in_little_memory(test);
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        return;
    }
    let path = std::env::temp_dir().join(format!("tombolo-huge-{}", std::process::id()));
    let file = std::fs::File::create(&path).expect("a file");
    file.set_len(2 * LIMIT).expect("a hole");
    let read = std::fs::read(&path);
    std::fs::remove_file(&path).expect("removed");
    assert_eq!(read.expect_err("there is no memory").kind(), std::io::ErrorKind::OutOfMemory);
}
