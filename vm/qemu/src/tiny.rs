// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The smallest guest that proves that a hypervisor runs stock kernels: an initramfs whose only program says one line
//! and switches the machine off.

use crate::cpio::Archive;

/// The guest's message when its user space runs.
pub const SAYS: &str = "tombolo-probe: user space runs";

const REBOOT: u8 = 169;
const WRITE: u8 = 1;

/// The initramfs, uncompressed: /init and the console that it writes to.
pub fn initramfs() -> Vec<u8> {
    let mut archive = Archive::new(Vec::new());
    let written = archive
        .directory("dev")
        .and_then(|()| archive.device("dev/console", (5, 1)))
        .and_then(|()| archive.program("init", &program()))
        .and_then(|()| archive.finish());
    written.expect("a Vec takes every write, and the guest's files are small")
}

/// A static x86-64 ELF program: write(1, SAYS "\n"); reboot(RB_POWER_OFF); and again, should reboot return.
fn program() -> Vec<u8> {
    const BASE: u64 = 0x40_0000;
    const HEADERS: u64 = 64 + 56;
    let text = format!("{SAYS}\n");
    let length = u8::try_from(text.len()).expect("one line");

    let mut code = Vec::new();
    code.extend_from_slice(&[0xb8, WRITE, 0, 0, 0]); // mov eax, WRITE
    code.extend_from_slice(&[0xbf, 1, 0, 0, 0]); // mov edi, 1
    let patch = code.len() + 3;
    code.extend_from_slice(&[0x48, 0x8d, 0x35, 0, 0, 0, 0]); // lea rsi, [rip + text]
    let after = code.len();
    code.extend_from_slice(&[0xba, length, 0, 0, 0]); // mov edx, length
    code.extend_from_slice(&[0x0f, 0x05]); // syscall
    code.extend_from_slice(&[0xb8, REBOOT, 0, 0, 0]); // mov eax, REBOOT
    code.push(0xbf); // mov edi, LINUX_REBOOT_MAGIC1
    code.extend_from_slice(&0xfee1_dead_u32.to_le_bytes());
    code.push(0xbe); // mov esi, LINUX_REBOOT_MAGIC2
    code.extend_from_slice(&672_274_793_u32.to_le_bytes());
    code.push(0xba); // mov edx, LINUX_REBOOT_CMD_POWER_OFF
    code.extend_from_slice(&0x4321_fedc_u32.to_le_bytes());
    code.extend_from_slice(&[0x0f, 0x05]); // syscall
    let back = i8::try_from(-(i64::try_from(code.len()).expect("short code") + 2)).expect("short code");
    code.extend_from_slice(&[0xeb, back.to_le_bytes()[0]]); // jmp start
    let distance = u32::try_from(code.len() - after).expect("short code");
    code[patch..patch + 4].copy_from_slice(&distance.to_le_bytes());
    code.extend_from_slice(text.as_bytes());

    let size = HEADERS + code.len() as u64;
    let mut elf = vec![0x7f, b'E', b'L', b'F', 2, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    for half in [2u16, 62] {
        elf.extend_from_slice(&half.to_le_bytes()); // executable, x86-64
    }
    elf.extend_from_slice(&1u32.to_le_bytes());
    for word in [BASE + HEADERS, 64, 0] {
        elf.extend_from_slice(&word.to_le_bytes()); // entry, program headers, no sections
    }
    elf.extend_from_slice(&0u32.to_le_bytes());
    for half in [64u16, 56, 1, 64, 0, 0] {
        elf.extend_from_slice(&half.to_le_bytes());
    }
    for word in [1u32, 5] {
        elf.extend_from_slice(&word.to_le_bytes()); // PT_LOAD, read and execute
    }
    for word in [0, BASE, BASE, size, size, 4096] {
        elf.extend_from_slice(&word.to_le_bytes());
    }
    elf.extend_from_slice(&code);
    elf
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_archive_is_one_that_cpio_reads() {
        let archive = initramfs();
        assert_eq!(archive.len() % 4, 0);
        let text = String::from_utf8_lossy(&archive);
        assert_eq!(text.matches("070701").count(), 4);
        assert!(text.contains("TRAILER!!!"));
    }
}
