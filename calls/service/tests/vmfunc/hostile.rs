// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A client that enters its gate at any byte, with any index, and whatever it likes in its registers.

use std::arch::{asm, x86_64::_rdtsc};
use std::fs::File;
use std::os::fd::AsRawFd;

#[allow(non_camel_case_types, dead_code, clippy::all)]
mod format {
    include!(concat!(env!("OUT_DIR"), "/format.rs"));
}

const PAGE: usize = 4096;
/// Another GiB than the library's.
const GATE: usize = 0x3000_0000_0000 + format::TMB_VISIT_GATE as usize;
const LIST: usize = GATE - format::TMB_VISIT_GATE as usize + format::TMB_VISIT_LIST as usize;
/// Results beside those of visit.h.
const UNDEFINED: u64 = 0x111;
const RETURNED: u64 = 0x112;
const STRAY: u64 = 0x113;

/// Offsets in the page behind the gate's: the saved stack pointer, where attempts end, and where they begin.
const SAVED: usize = PAGE;
const END: usize = PAGE + 0x40;
const BEGIN: usize = PAGE + 0x80;

struct Hostile {
    _device: File,
    gate: u32,
    service: u32,
    enter: usize,
    exit: usize,
}

fn write(at: usize, bytes: &[u8]) {
    // SAFETY: inside of the two pages that bind() maps, which only this program uses.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), (GATE + at) as *mut u8, bytes.len()) };
}

fn jump(from: usize, to: usize) {
    write(from, &[0xe9]);
    write(from + 1, &(to as i32 - (from as i32 + 5)).to_le_bytes());
}

extern "C" fn caught(signal: libc::c_int, _info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel gives a handler with SA_SIGINFO its context.
    let registers = unsafe { &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs };
    registers[libc::REG_RIP as usize] = (GATE + END) as i64;
    registers[libc::REG_RAX as usize] = if signal == libc::SIGILL { UNDEFINED } else { STRAY } as i64;
}

/// Signals need a stack that the attempts don't point elsewhere.
fn catch_signals() {
    let stack = Box::leak(vec![0u8; 64 << 10].into_boxed_slice());
    let stack = libc::stack_t { ss_sp: stack.as_mut_ptr().cast(), ss_flags: 0, ss_size: stack.len() };
    // SAFETY: the stack lives for ever, the handler is a function of this type.
    unsafe {
        assert_eq!(libc::sigaltstack(&raw const stack, std::ptr::null_mut()), 0);
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = caught as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        for signal in [libc::SIGILL, libc::SIGSEGV] {
            assert_eq!(libc::sigaction(signal, &raw const action, std::ptr::null_mut()), 0);
        }
    }
}

impl Hostile {
    fn bind(name: &str) -> Hostile {
        let device =
            File::options().read(true).write(true).open(tombolo_service::vmfunc::DEVICE).expect("the device");
        let all = libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
        // SAFETY: only where nothing is mapped.
        let got = unsafe { libc::mmap(GATE as *mut libc::c_void, 2 * PAGE, all, flags, -1, 0) };
        assert_eq!(got as usize, GATE);
        let mut bind = format::tmb_visit_bind { name: [0; 48], gate: GATE as u64, binding: 0, index: 0 };
        for (to, from) in bind.name.iter_mut().zip(name.bytes()) {
            *to = from as libc::c_char;
        }
        // SAFETY: the request's own structure.
        let r = unsafe {
            libc::ioctl(device.as_raw_fd(), libc::Ioctl::from(format::TMB_VISIT_IOC_BIND), &raw mut bind)
        };
        assert_eq!(r, 0, "{}", std::io::Error::last_os_error());
        let enter = (format::TMB_VISIT_ENTER_BASE + 8 * bind.index) as usize;
        let exit = enter + format::TMB_VISIT_BETWEEN as usize;
        let hostile = Hostile {
            _device: device,
            gate: format::TMB_VISIT_GATE_INDEX + bind.binding,
            service: bind.index,
            enter,
            exit,
        };
        // mov saved, %rsp; ret
        write(END, &[0x48, 0x8b, 0x25]);
        write(END + 3, &(SAVED as i32 - (END as i32 + 7)).to_le_bytes());
        write(END + 7, &[0xc3]);
        hostile
    }

    /// Executes VMFUNC so that the next instruction is at `next` of the page, with this index, and `edx`; all other registers lead into the list.
    /// Returns why the visit ended, or RETURNED.
    fn attempt(&self, next: usize, index: u32, edx: u32) -> u64 {
        write(0, &[0xcc; PAGE]);
        jump(format::TMB_VISIT_LANDING as usize, END);
        let back = self.exit + format::TMB_VISIT_EXIT_SIZE as usize;
        write(back, &[0xb8]);
        write(back + 1, &(RETURNED as u32).to_le_bytes());
        jump(back + 5, END);
        // The VM's own memory: VMFUNC stays here.
        if index == 0 {
            write(next, &[0xb8]);
            write(next + 1, &(RETURNED as u32).to_le_bytes());
            jump(next + 5, END);
        }
        write(next - 3, &[0x0f, 0x01, 0xd4]);
        jump(BEGIN, next - 3);
        let list = LIST + 8 * self.service as usize;
        let result: u64;
        // SAFETY: the code at BEGIN ends at END, by whatever way, with the stack pointer that was saved; all registers are given up.
        unsafe {
            asm!(
                "push rbx", "push rbp",
                "lea r11, [rip + 2f]", "push r11",
                "mov [r10], rsp",
                "mov rbx, rsi", "mov rbp, rsi", "mov rsp, rsi", "mov r8, rsi", "mov r9, rsi",
                "mov r11, r12",
                "mov rdi, rsi",
                "jmp r11",
                "2:",
                "pop rbp", "pop rbx",
                in("r10") GATE + SAVED, in("r12") GATE + BEGIN, in("rsi") list,
                inout("rax") 0u64 => result, in("rcx") u64::from(index), in("rdx") u64::from(edx),
                lateout("rcx") _, lateout("rdx") _, lateout("rsi") _, lateout("rdi") _, lateout("r8") _, lateout("r9") _, lateout("r10") _,
                lateout("r11") _, lateout("r12") _, lateout("r13") _, lateout("r14") _, lateout("r15") _, clobber_abi("sysv64"),
            );
        }
        result
    }

    fn is_shut(&self) {
        let inside = self.attempt(self.enter + format::TMB_VISIT_ENTER_SIZE as usize, self.service, 0);
        assert_eq!(inside, UNDEFINED, "the service's entry is valid in the client's own memory");
    }
}

/// Enters by each index, and the gate at each byte around its code, and at some others.
pub fn enters_everywhere(name: &str) {
    catch_signals();
    let hostile = Hostile::bind(name);
    hostile.is_shut();
    for index in (0..512).chain([513, 0x1_0000, u32::MAX]) {
        let result = hostile.attempt(0x800, index, 0);
        let gates = format::TMB_VISIT_GATE_INDEX..format::TMB_VISIT_GATE_INDEX + format::TMB_VISIT_BINDINGS;
        match index {
            0 => assert_eq!(result, RETURNED),
            _ if index == hostile.gate => assert_eq!(result, u64::from(format::TMB_VISIT_FAULT)),
            // Another process' gate: no translation there, and its landing is no memory of this one.
            _ if gates.contains(&index) => {
                assert!([UNDEFINED, STRAY].contains(&result), "index {index:#x}: {result:#x}")
            }
            _ => assert_eq!(result, UNDEFINED, "index {index:#x}"),
        }
    }
    hostile.is_shut();
    let near = |from: usize| from - 4..from + 20;
    let far = (0x60..PAGE - 16).step_by(96);
    let mut ended = 0;
    for at in near(hostile.enter).chain(near(hostile.exit)).chain(far) {
        for edx in [0, hostile.service, hostile.gate, 0x1ff] {
            let result = hostile.attempt(at, hostile.gate, edx);
            ended += u32::from(result != RETURNED);
            hostile.is_shut();
        }
    }
    println!(
        "claim: a client that enters its gate at any byte and by any index gets nowhere ({ended} visits ended)"
    );
}

/// Instructions of an empty call, with the three that pass its arguments and the two of the loop, by a time stamp that counts instructions.
pub fn instructions(name: &str) -> u64 {
    let bound =
        tombolo_service::vmfunc::Bound::new(tombolo_service::vmfunc::DEVICE.as_ref(), name).expect("bound");
    let least = |calls: u64| {
        let one = || {
            let mut result = 0u64;
            // SAFETY: it reads a counter.
            let begun = unsafe { _rdtsc() };
            // SAFETY: entry() is a C function of this type; its call 3 returns its first argument.
            unsafe {
                asm!(
                    "2:", "mov edi, 3", "mov rsi, rbx", "mov r8, r13", "call r12", "dec r14", "jnz 2b",
                    in("r12") bound.entry(), in("r13") &raw mut result, inout("r14") calls => _, clobber_abi("sysv64"),
                );
            }
            // SAFETY: as above.
            unsafe { _rdtsc() - begun }
        };
        (0..50).map(|_| one()).min().expect("fifty")
    };
    let (few, many) = (least(10), least(110));
    (many - few) / 100
}
