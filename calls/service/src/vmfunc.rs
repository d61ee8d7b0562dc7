// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The client's side of a visit, in a guest: the page with its own half of the gate, and the device of the guest's module (linux/visit.h).

use crate::format::{self, tmb_visit_bind};
use crate::{Ended, Error, NAME_MAX, Service, Way};
use std::arch::global_asm;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tombolo_calls::Window;
use tombolo_calls::memory::Mapping;
use tombolo_calls::spin::Spin;

/// The device of the guest's module.
pub const DEVICE: &str = "/dev/tombolo-service";
/// Bytes of a client's window.
pub const WINDOW: u64 = format::TMB_VISIT_WINDOW_SIZE as u64;

const PAGE: usize = 4096;
const GIB: u64 = 1 << 30;
/// Linear addresses from which a free GiB is looked for, and how many are tried.
const FIRST: u64 = 0x2000_0000_0000 + GIB;
const TRIES: u64 = 64;
/// How long a call waits for visits of others before it sleeps between its tries.
const BUSY: Duration = Duration::from_micros(50);

// The client's own code on the gate's page; the page behind it keeps the stack pointer. It is copied to where the gate is, and three places are filled in.
global_asm!(
    ".pushsection .rodata.tombolo_visit, \"a\"",
    ".balign 64",
    "tombolo_visit_own:",
    ".skip {landing} - (. - tombolo_visit_own), 0xcc",
    "mov tombolo_visit_own + 0x1000(%rip), %rsp",
    "xor %r8d, %r8d",
    "jmp 2f",
    ".skip {call} - (. - tombolo_visit_own), 0xcc",
    "push %rbx",
    "push %rbp",
    "push %r12",
    "push %r13",
    "push %r14",
    "push %r15",
    "push %r8",
    "sub $8, %rsp",
    "stmxcsr (%rsp)",
    "mov %rsp, tombolo_visit_own + 0x1000(%rip)",
    "mov %rdx, %r8",
    "mov %rcx, %r9",
    "xor %eax, %eax",
    ".byte 0xb9", // mov $index, %ecx
    "tombolo_visit_own_index: .long 0",
    ".byte 0xe9", // jmp to the VMFUNC before the gate's code
    "tombolo_visit_own_enter: .long 0",
    "tombolo_visit_own_back:",
    "mov tombolo_visit_own + 0x1000(%rip), %rsp",
    "mov %r9d, %eax",
    "2:",
    "cld",
    "ldmxcsr (%rsp)",
    "add $8, %rsp",
    "pop %rcx",
    "mov %r8, (%rcx)",
    "pop %r15",
    "pop %r14",
    "pop %r13",
    "pop %r12",
    "pop %rbp",
    "pop %rbx",
    "ret",
    "tombolo_visit_own_end:",
    ".popsection",
    landing = const format::TMB_VISIT_LANDING,
    call = const CALL,
    options(att_syntax)
);

const CALL: usize = 0x80;

unsafe extern "C" {
    static tombolo_visit_own: u8;
    static tombolo_visit_own_index: u8;
    static tombolo_visit_own_enter: u8;
    static tombolo_visit_own_back: u8;
    static tombolo_visit_own_end: u8;
}

type Call = unsafe extern "C" fn(call: u64, a: u64, b: u64, c: u64, result: *mut u64) -> u32;

/// The gate's page and the page behind it; unmapped when dropped.
struct Gate {
    base: *mut u8,
}

// SAFETY: memory that only the owner of the value uses.
unsafe impl Send for Gate {}

impl Gate {
    /// Takes two pages at the gate's place in a GiB in which they are free.
    fn take() -> io::Result<Gate> {
        let (access, flags) = (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE,
        );
        for turn in 0..TRIES {
            let at = (FIRST + turn * GIB + u64::from(format::TMB_VISIT_GATE)) as *mut libc::c_void;
            // SAFETY: only where nothing is mapped.
            let got = unsafe { libc::mmap(at, 2 * PAGE, access, flags, -1, 0) };
            if got == at {
                return Ok(Gate { base: got.cast() });
            }
            if got != libc::MAP_FAILED {
                // SAFETY: what was just mapped.
                unsafe { libc::munmap(got, 2 * PAGE) };
            }
        }
        Err(io::ErrorKind::AddrInUse.into())
    }

    /// Writes the client's half for a binding, after which it can only be executed and read.
    fn fill(&mut self, binding: u32, index: u32) -> io::Result<()> {
        let enter = (format::TMB_VISIT_ENTER_BASE + 8 * index) as usize;
        let back = enter + (format::TMB_VISIT_BETWEEN + format::TMB_VISIT_EXIT_SIZE) as usize;
        let own = &raw const tombolo_visit_own;
        let offset = |label: *const u8| label as usize - own as usize;
        let (at_index, at_enter) =
            (offset(&raw const tombolo_visit_own_index), offset(&raw const tombolo_visit_own_enter));
        let (at_back, len) =
            (offset(&raw const tombolo_visit_own_back), offset(&raw const tombolo_visit_own_end));
        let vmfunc = enter - format::TMB_VISIT_VMFUNC_SIZE as usize;
        let mut page = vec![0xccu8; PAGE];
        // SAFETY: the bytes between two labels of this program's own data.
        page[..len].copy_from_slice(unsafe { std::slice::from_raw_parts(own, len) });
        let mut put = |at: usize, bytes: &[u8]| page[at..at + bytes.len()].copy_from_slice(bytes);
        let jump = |from: usize, to: usize| (to as i32 - from as i32).to_le_bytes();
        put(at_index, &(format::TMB_VISIT_GATE_INDEX + binding).to_le_bytes());
        put(at_enter, &jump(at_enter + 4, vmfunc));
        put(vmfunc, &[0x0f, 0x01, 0xd4]);
        put(back, &[0xe9]);
        put(back + 1, &jump(back + 5, at_back));
        // SAFETY: the first of this value's two pages.
        unsafe { std::ptr::copy_nonoverlapping(page.as_ptr(), self.base, PAGE) };
        // SAFETY: as above.
        if unsafe { libc::mprotect(self.base.cast(), PAGE, libc::PROT_READ | libc::PROT_EXEC) } < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        // SAFETY: the value's own pages.
        unsafe { libc::munmap(self.base.cast(), 2 * PAGE) };
    }
}

/// A binding of this process. Its thread of the moment calls; a forked child's calls fail.
pub struct Bound {
    gate: Gate,
    window: Window,
    _device: File,
}

impl Bound {
    /// Binds to a service that this VM's host offers.
    pub fn new(device: &Path, name: &str) -> Result<Bound, Error> {
        let failed = |e: io::Error| Error::Io(device.display().to_string(), e);
        let file = File::options().read(true).write(true).open(device).map_err(failed)?;
        let mut gate = Gate::take().map_err(failed)?;
        let mut bind = tmb_visit_bind {
            name: crate::host::name_bytes(name),
            gate: gate.base as u64,
            binding: 0,
            index: 0,
        };
        // SAFETY: the request's own structure, which lives during the call.
        let r = unsafe {
            libc::ioctl(file.as_raw_fd(), libc::Ioctl::from(format::TMB_VISIT_IOC_BIND), &raw mut bind)
        };
        if r < 0 {
            return Err(refused(name, io::Error::last_os_error()));
        }
        gate.fill(bind.binding, bind.index).map_err(failed)?;
        let mapping = Arc::new(Mapping::of_file(&file, 0, WINDOW as usize).map_err(failed)?);
        let window =
            Window::new(mapping, 0, WINDOW).ok_or_else(|| failed(io::ErrorKind::InvalidData.into()))?;
        Ok(Bound { gate, window, _device: file })
    }

    /// The function that enters the service: `uint32_t (*)(uint64_t call, uint64_t a, uint64_t b, uint64_t c, uint64_t *result)`, which returns 0, or
    /// TMB_VISIT_… (linux/visit.h) and no result. One thread at a time may call it, as long as the binding lives.
    pub fn entry(&self) -> *const u8 {
        self.gate.base.wrapping_add(CALL)
    }

    fn visit(&mut self, call: u32, [a, b, c]: [u64; 3]) -> (u32, u64) {
        let mut result = 0;
        // SAFETY: fill() wrote a function of this type there.
        let function: Call = unsafe { std::mem::transmute(self.entry()) };
        // SAFETY: the binding lives, so VMFUNC enters its gate, which returns here, and the host's module sees to it that nothing but `result` and the
        // window changes.
        let status = unsafe { function(u64::from(call), a, b, c, &raw mut result) };
        (status, result)
    }
}

fn refused(name: &str, e: io::Error) -> Error {
    debug_assert!(name.len() <= NAME_MAX);
    match e.raw_os_error() {
        Some(libc::ENOENT) => Error::Refused(format!(
            "{name}: the host offers this VM no such service; the server has to admit the VM"
        )),
        Some(libc::ENOSYS) => Error::Refused(format!(
            "{name}: the host has no visits: its module tombolo_service_host is not loaded, or not for this VM"
        )),
        Some(libc::EOPNOTSUPP) => {
            Error::Refused(format!("{name}: the host's kvm_intel has to be loaded with enable_apicv=0"))
        }
        Some(libc::EUSERS) => Error::Refused(format!(
            "{name}: this VM has {} bindings, and no more are possible",
            format::TMB_VISIT_BINDINGS
        )),
        _ => Error::Io(format!("binding to {name}"), e),
    }
}

impl Service for Bound {
    fn call(&mut self, call: u32, arguments: [u64; 3]) -> Result<u64, Error> {
        let mut spin = Spin::new(BUSY);
        loop {
            match self.visit(call, arguments) {
                (format::TMB_VISIT_DONE, result) => return Ok(result),
                (format::TMB_VISIT_NO_CALL, _) => return Err(Error::NoSuchCall(call)),
                (format::TMB_VISIT_BUSY, _) => {}
                (format::TMB_VISIT_TOO_LONG, _) => return Err(Error::Ended(Ended::TooLong)),
                (format::TMB_VISIT_FAULT, _) => return Err(Error::Ended(Ended::Fault)),
                (format::TMB_VISIT_GONE, _) => return Err(Error::Gone),
                (other, _) => {
                    return Err(Error::Ended(Ended::Exit(other.wrapping_sub(format::TMB_VISIT_EXIT_REASON))));
                }
            }
            if !spin.turn() {
                std::thread::sleep(BUSY);
            }
        }
    }

    fn window(&self) -> &Window {
        &self.window
    }

    fn way(&self) -> Way {
        Way::Vmfunc
    }
}
