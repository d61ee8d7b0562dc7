// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The object of a service, checked: position-independent without relocations, nothing both writable and executable, and no instruction in it that
//! leaves the service's context, or that changes what belongs to its client.

use iced_x86::{Code, Decoder, DecoderOptions, FlowControl, Instruction, Mnemonic};
use object::Endianness;
use object::elf::{DT_NEEDED, DT_RELASZ, DT_RELSZ, ET_DYN, FileHeader64, PF_R, PF_W, PF_X, PT_LOAD, PT_TLS};
use object::read::elf::{Dyn, FileHeader, ProgramHeader, SectionHeader};
use std::path::Path;

/// Bytes of a page.
pub const PAGE: u64 = 4096;
/// The most memory of a service.
pub const SIZE_MAX: u64 = 128 << 20;
/// The most calls of a service.
pub const CALLS_MAX: usize = 1024;

/// A tag that the crate lacks: bytes of packed relocations.
const DT_RELRSZ: u32 = 35;
/// The section with the calls' addresses: for each an offset of four bytes, relative to itself.
const CALLS: &[u8] = b".tombolo.calls";

/// The reason why an object is no service.
#[derive(Debug, thiserror::Error)]
pub enum Refused {
    /// It can't be read.
    #[error("{0}: {1}")]
    Read(String, std::io::Error),
    /// It is not what the format wants; the text says what to do.
    #[error("{0}: {1}")]
    Format(String, String),
    /// An instruction that a service may not execute.
    #[error("{file}: at {at:#x}: a service may not execute `{instruction}`; {remedy}")]
    Instruction {
        /// The object's name.
        file: String,
        /// The address, as a disassembler shows it.
        at: u64,
        /// The instruction's name.
        instruction: String,
        /// What to do.
        remedy: &'static str,
    },
}

/// Memory of a service with one protection, page-aligned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Segment {
    /// The offset from the service's start.
    pub at: u64,
    /// The bytes, padded to whole pages.
    pub bytes: Vec<u8>,
    /// May it be written? Only what may not be written is executed.
    pub write: bool,
    /// May it be executed?
    pub execute: bool,
}

/// A checked service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image {
    /// In order, without overlap.
    pub segments: Vec<Segment>,
    /// The calls' offsets from the service's start.
    pub calls: Vec<u32>,
}

impl Image {
    /// Reads and checks a service's object.
    pub fn read(path: &Path) -> Result<Image, Refused> {
        let name = path.display().to_string();
        let bytes = std::fs::read(path).map_err(|e| Refused::Read(name.clone(), e))?;
        Image::parse(&name, &bytes)
    }

    /// The same for an object in memory; `name` is for errors.
    pub fn parse(name: &str, bytes: &[u8]) -> Result<Image, Refused> {
        let file = Object { name, bytes };
        let mut segments = file.segments()?;
        segments.sort_by_key(|s| s.at);
        for pair in segments.windows(2) {
            if pair[0].at + pair[0].bytes.len() as u64 > pair[1].at {
                return Err(file
                    .format("parts with different protection share a page: link it with -z separate-code"));
            }
        }
        file.check_dynamic()?;
        let calls = file.calls(&segments)?;
        for segment in segments.iter().filter(|s| s.execute) {
            check_code(name, segment)?;
        }
        Ok(Image { segments, calls })
    }

    /// Bytes from the service's start to its end, in whole pages.
    pub fn len(&self) -> u64 {
        self.segments.last().map_or(0, |s| s.at + s.bytes.len() as u64)
    }

    /// Returns whether it has no memory at all, which [`Image::parse`] refuses.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

struct Object<'a> {
    name: &'a str,
    bytes: &'a [u8],
}

impl Object<'_> {
    fn format(&self, what: impl Into<String>) -> Refused {
        Refused::Format(self.name.into(), what.into())
    }

    fn header(&self) -> Result<&FileHeader64<Endianness>, Refused> {
        let header = FileHeader64::<Endianness>::parse(self.bytes)
            .map_err(|e| self.format(format!("no ELF object: {e}")))?;
        let endian = header.endian().map_err(|e| self.format(e.to_string()))?;
        if header.e_machine.get(endian) != object::elf::EM_X86_64 || header.e_type.get(endian) != ET_DYN {
            return Err(self.format("no shared object for x86-64: link it with -shared"));
        }
        Ok(header)
    }

    fn segments(&self) -> Result<Vec<Segment>, Refused> {
        let header = self.header()?;
        let bad = |e: object::read::Error| self.format(e.to_string());
        let endian = header.endian().map_err(bad)?;
        let mut segments = Vec::new();
        for part in header.program_headers(endian, self.bytes).map_err(bad)? {
            if part.p_type(endian) == PT_TLS {
                return Err(self.format("thread-local variables: a service has no threads"));
            }
            if part.p_type(endian) != PT_LOAD || part.p_memsz(endian) == 0 {
                continue;
            }
            let (flags, at, size) = (part.p_flags(endian), part.p_vaddr(endian), part.p_memsz(endian));
            if flags & PF_W != 0 && flags & PF_X != 0 {
                return Err(self.format("memory that is both writable and executable"));
            }
            if flags & PF_R == 0 || at > SIZE_MAX || size > SIZE_MAX - at {
                return Err(
                    self.format(format!("a part that can't be read or lies beyond {} MiB", SIZE_MAX >> 20))
                );
            }
            let data = part.data(endian, self.bytes).map_err(|()| self.format("cut short"))?;
            let start = at - at % PAGE;
            let mut bytes = vec![0; ((at + size).next_multiple_of(PAGE) - start) as usize];
            let skip = (at - start) as usize;
            if data.len() as u64 > size {
                return Err(self.format("a part with more bytes than memory"));
            }
            bytes[skip..skip + data.len()].copy_from_slice(data);
            segments.push(Segment { at: start, bytes, write: flags & PF_W != 0, execute: flags & PF_X != 0 });
        }
        Ok(segments)
    }

    /// Nothing is loaded beside it and nothing in it depends on where it lies.
    fn check_dynamic(&self) -> Result<(), Refused> {
        let header = self.header()?;
        let bad = |e: object::read::Error| self.format(e.to_string());
        let endian = header.endian().map_err(bad)?;
        for part in header.program_headers(endian, self.bytes).map_err(bad)? {
            for entry in part.dynamic(endian, self.bytes).map_err(bad)?.unwrap_or_default() {
                let (tag, value) = (entry.d_tag(endian), entry.d_val(endian));
                if tag == u64::from(DT_NEEDED) {
                    return Err(self.format("it needs a shared library: link it with -nostdlib"));
                }
                if value != 0
                    && [DT_RELASZ, DT_RELSZ, DT_RELRSZ, object::elf::DT_PLTRELSZ].contains(&(tag as u32))
                {
                    return Err(self.format(
                        "relocations: compile with -fPIC -fvisibility=hidden, link with -Bsymbolic, and keep no addresses in initialized data",
                    ));
                }
            }
        }
        Ok(())
    }

    fn calls(&self, segments: &[Segment]) -> Result<Vec<u32>, Refused> {
        let header = self.header()?;
        let bad = |e: object::read::Error| self.format(e.to_string());
        let endian = header.endian().map_err(bad)?;
        let sections = header.sections(endian, self.bytes).map_err(bad)?;
        let (_, section) = sections
            .section_by_name(endian, CALLS)
            .ok_or_else(|| self.format("it has no call: name one by TOMBOLO_CALL"))?;
        let table = section.data(endian, self.bytes).map_err(bad)?;
        let at = section.sh_addr(endian);
        let mut calls = Vec::new();
        for (i, offset) in table.chunks_exact(4).enumerate() {
            let offset = i64::from(i32::from_le_bytes([offset[0], offset[1], offset[2], offset[3]]));
            let target = (at as i64).wrapping_add(4 * i as i64).wrapping_add(offset);
            let inside = |s: &&Segment| {
                s.execute && (s.at as i64..s.at as i64 + s.bytes.len() as i64).contains(&target)
            };
            match segments.iter().find(inside) {
                Some(_) => calls.push(target as u32),
                None => return Err(self.format(format!("call {i} is no code of the service"))),
            }
        }
        if calls.is_empty() || calls.len() > CALLS_MAX {
            return Err(self.format(format!("{} calls: 1 to {CALLS_MAX} are possible", calls.len())));
        }
        Ok(calls)
    }
}

/// Bytes that may stand nowhere in code, not even inside of another instruction. Where the context is entered and left is guarded by them: the host's
/// module looks for them again.
fn forbidden(bytes: &[u8]) -> Option<&'static str> {
    match *bytes {
        [0x0f, 0x01, 0xd4, ..] => Some("vmfunc"),
        [0x0f, 0x01, 0xef, ..] => Some("wrpkru"),
        [0x0f, 0xae, 0xd0..=0xd7, ..] => Some("wrfsbase"),
        [0x0f, 0xae, 0xd8..=0xdf, ..] => Some("wrgsbase"),
        _ => None,
    }
}

const SHUFFLE: &str = "change the code around it, so that the compiler chooses other bytes";
const OUTSIDE: &str = "what needs the kernel or a device belongs into the server, behind a ring";

fn check_code(name: &str, segment: &Segment) -> Result<(), Refused> {
    let refused = |at: u64, instruction: String, remedy| {
        Err(Refused::Instruction { file: name.into(), at, instruction, remedy })
    };
    for (i, bytes) in segment.bytes.windows(3).enumerate() {
        if let Some(instruction) = forbidden(bytes) {
            return refused(segment.at + i as u64, instruction.into(), SHUFFLE);
        }
    }
    let mut decoder = Decoder::with_ip(64, &segment.bytes, segment.at, DecoderOptions::NONE);
    let mut instruction = Instruction::default();
    while decoder.can_decode() {
        decoder.decode_out(&mut instruction);
        if leaves(&instruction) {
            let mnemonic = format!("{:?}", instruction.mnemonic()).to_lowercase();
            return refused(instruction.ip(), mnemonic, OUTSIDE);
        }
    }
    Ok(())
}

/// Returns whether an instruction asks a kernel, a hypervisor or a device, or changes segments, shadow stacks or the extended state of its client.
fn leaves(instruction: &Instruction) -> bool {
    use Mnemonic as M;
    if instruction.code() == Code::INVALID {
        return false; // Padding between functions; executed, it ends the visit.
    }
    let asks = matches!(
        instruction.mnemonic(),
        M::Syscall
            | M::Sysenter
            | M::Int
            | M::Int1
            | M::Into
            | M::Cpuid
            | M::In
            | M::Out
            | M::Insb
            | M::Insw
            | M::Insd
            | M::Outsb
    ) || matches!(
        instruction.mnemonic(),
        M::Outsw | M::Outsd | M::Vmcall | M::Vmmcall | M::Vmfunc | M::Hlt | M::Lss | M::Lfs | M::Lgs
    ) || matches!(
        instruction.mnemonic(),
        M::Xrstor | M::Xrstor64 | M::Xrstors | M::Xrstors64 | M::Wrpkru | M::Wrfsbase | M::Wrgsbase
    );
    let far = instruction.is_jmp_far()
        || instruction.is_jmp_far_indirect()
        || instruction.is_call_far()
        || instruction.is_call_far_indirect();
    let segment =
        matches!(instruction.mnemonic(), M::Mov | M::Pop) && instruction.op0_register().is_segment_register();
    let returns = matches!(
        instruction.mnemonic(),
        M::Retf | M::Iret | M::Iretd | M::Iretq | M::Sysret | M::Sysretq | M::Sysexit
    );
    let interrupt = instruction.flow_control() == FlowControl::Interrupt && instruction.mnemonic() != M::Int3;
    asks || far || segment || returns || interrupt || instruction.is_privileged()
}
