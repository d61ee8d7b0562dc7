// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Images of device code, whose length only they themselves tell: fat binaries, ELF files and PTX. The client reads a program's memory with this, and the server
//! compares what came.

/// The magic number of the wrapper that compilers put around a fat binary: magic, version, the binary's address, and one more word.
pub const WRAPPER: u32 = 0x4662_43b1;
const FAT: u32 = 0xba55_ed50;
const ELF: u32 = u32::from_le_bytes(*b"\x7fELF");
/// No image is longer.
pub const MAX: u64 = 1 << 30;
/// SHT_NOBITS: a section without bytes in the file.
const NO_BITS: u64 = 8;

/// Reads so many bytes at an offset of the image; None: they are not there.
pub type Read<'r> = dyn Fn(u64, u64) -> Option<&'r [u8]> + 'r;

fn number(read: &Read<'_>, at: u64, len: u64) -> Option<u64> {
    let mut bytes = [0; 8];
    bytes[..len as usize].copy_from_slice(read(at, len)?);
    Some(u64::from_le_bytes(bytes))
}

/// The bytes of an image; None: it is none, or longer than [`MAX`].
pub fn length(read: &Read<'_>) -> Option<u64> {
    let len = match number(read, 0, 4)? as u32 {
        FAT => number(read, 6, 2)?.checked_add(number(read, 8, 8)?),
        ELF => elf(read),
        _ => text(read),
    };
    len.filter(|len| *len <= MAX)
}

/// The last byte that a header, a segment or a section of a 64-bit ELF file has.
fn elf(read: &Read<'_>) -> Option<u64> {
    let mut end = 64;
    let [segments, sections] = [(32, 54), (40, 58)].map(|(table, entry)| {
        Some((number(read, table, 8)?, number(read, entry, 2)?, number(read, entry + 2, 2)?))
    });
    let (segments, sections) = (segments?, sections?);
    for (table, size, count) in [segments, sections] {
        end = end.max(table.checked_add(size * count)?);
    }
    if end > MAX {
        return None;
    }
    let (table, size, count) = segments;
    for at in (0..count).map(|i| table + i * size) {
        end = end.max(number(read, at + 8, 8)?.checked_add(number(read, at + 32, 8)?)?);
    }
    let (table, size, count) = sections;
    for at in (0..count).map(|i| table + i * size) {
        if number(read, at + 4, 4)? != NO_BITS {
            end = end.max(number(read, at + 24, 8)?.checked_add(number(read, at + 32, 8)?)?);
        }
    }
    Some(end)
}

/// PTX ends with a zero, which counts.
fn text(read: &Read<'_>) -> Option<u64> {
    (0..MAX).find(|at| read(*at, 1).is_none_or(|byte| byte == [0])).and_then(|at| read(at, 1).map(|_| at + 1))
}

/// Returns whether bytes are one whole image.
pub fn is_whole(bytes: &[u8]) -> bool {
    let read = |at: u64, len: u64| bytes.get(at as usize..)?.get(..len as usize);
    length(&read) == Some(bytes.len() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fat(len: u64) -> Vec<u8> {
        let mut image = FAT.to_le_bytes().to_vec();
        image.extend_from_slice(&[1, 0, 16, 0]);
        image.extend_from_slice(&len.to_le_bytes());
        image
    }

    #[test]
    fn a_fat_binary_and_ptx_are_as_long_as_they_say() {
        let mut image = fat(4);
        assert!(!is_whole(&image));
        image.extend_from_slice(&[0; 4]);
        assert!(is_whole(&image));
        image.push(0);
        assert!(!is_whole(&image));
        assert!(is_whole(b".version 8.0\0") && !is_whole(b".version 8.0") && !is_whole(b"a\0b\0"));
    }

    #[test]
    fn an_elf_file_ends_with_the_last_of_what_its_tables_name() {
        let mut image = vec![0; 64 + 64];
        image[..4].copy_from_slice(b"\x7fELF");
        image[40] = 64;
        image[58] = 64;
        image[60] = 1;
        image[64 + 24] = 128;
        image[64 + 32] = 3;
        assert!(!is_whole(&image));
        image.extend_from_slice(&[0; 3]);
        assert!(is_whole(&image));
        image[64 + 4] = NO_BITS as u8;
        assert!(is_whole(&image[..128]));
    }

    #[test]
    fn lengths_that_overflow_are_no_image() {
        assert!(!is_whole(&fat(u64::MAX)) && !is_whole(&[]) && !is_whole(b"\x7fELF"));
        let mut image = vec![0xff; 256];
        image[..4].copy_from_slice(b"\x7fELF");
        assert!(!is_whole(&image));
    }
}
