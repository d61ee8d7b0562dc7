// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Images of device code: PTX text, a fat binary, or the wrapper that programs register, of version 1 (one fat binary) or 2 (a list of them, which are linked).
//! PTX inside may be compressed, by LZ4 or Zstandard. An ELF image holds instructions of one GPU model, which this device is not.

use std::io::Read as _;

#[derive(Debug, PartialEq, Eq)]
pub enum Refused {
    /// Neither text nor a known format, or damaged.
    Invalid(String),
    /// No PTX for this device's compute capability.
    NoBinary,
}

const WRAPPER: u32 = 0x4662_43b1;
const FAT: u32 = 0xba55_ed50;
const ELF: u32 = 0x464c_457f;
const FILE_HEADER: usize = 64;
const KIND_PTX: u16 = 1;
const LZ4: u64 = 0x2000;
const ZSTD: u64 = 0x8000;
/// Opens what `join` makes.
const LINKED: u32 = u32::from_le_bytes(*b"TPTX");
/// The compute capability for which PTX is taken.
pub const ARCHITECTURE: u32 = 90;
/// More than any compiler's output, so that a damaged size is found before it is allocated.
const LONGEST: u64 = 1 << 30;

/// The PTX texts of the image at an address: one for each fat binary in it.
///
/// # Safety
/// The address is that of an image as cuModuleLoadData takes it, which ends where its headers say, or is a C string.
pub unsafe fn texts(image: *const u8) -> Result<Vec<String>, Refused> {
    // SAFETY: every kind of image has four bytes, except for a text that is shorter: it is read to its end only.
    unsafe {
        if first_word(image) == Some(WRAPPER) {
            let version = image.add(4).cast::<u32>().read_unaligned();
            let pointers = image.add(8).cast::<*const u8>();
            if version == 1 {
                return Ok(vec![fat_text(fat_bytes(pointers.read_unaligned())?)?]);
            }
            let mut list = pointers.add(1).read_unaligned().cast::<*const u8>();
            let mut texts = Vec::new();
            while !list.read_unaligned().is_null() {
                texts.push(fat_text(fat_bytes(list.read_unaligned())?)?);
                list = list.add(1);
            }
            return Ok(texts);
        }
        match first_word(image) {
            Some(FAT) => Ok(vec![fat_text(fat_bytes(image)?)?]),
            Some(ELF) => Err(Refused::NoBinary),
            Some(LINKED) => {
                let size = image.add(8).cast::<u64>().read_unaligned() as usize;
                Ok(split(std::slice::from_raw_parts(image, size)))
            }
            _ => Ok(vec![
                std::ffi::CStr::from_ptr(image.cast())
                    .to_str()
                    .map_err(|_| Refused::Invalid("the image is no text".to_owned()))?
                    .to_owned(),
            ]),
        }
    }
}

/// An image of several texts: a mark, four zeros, the size of the whole, and each text with a zero behind it.
pub fn join(texts: &[String]) -> Vec<u8> {
    let mut out = [LINKED.to_le_bytes(), [0; 4]].concat();
    let size = 16 + texts.iter().map(|text| text.len() + 1).sum::<usize>();
    out.extend_from_slice(&(size as u64).to_le_bytes());
    for text in texts {
        out.extend_from_slice(text.as_bytes());
        out.push(0);
    }
    out
}

fn split(image: &[u8]) -> Vec<String> {
    let texts = image[16..].split(|&byte| byte == 0).filter(|text| !text.is_empty());
    texts.map(|text| String::from_utf8_lossy(text).into_owned()).collect()
}

/// The first four bytes, unless a text ends within them.
unsafe fn first_word(image: *const u8) -> Option<u32> {
    let mut word = [0; 4];
    for (at, byte) in word.iter_mut().enumerate() {
        // SAFETY: the image has not ended before this byte: none of those before is zero.
        *byte = unsafe { *image.add(at) };
        if *byte == 0 {
            return None;
        }
    }
    Some(u32::from_le_bytes(word))
}

/// The whole fat binary, header included.
unsafe fn fat_bytes<'a>(at: *const u8) -> Result<&'a [u8], Refused> {
    // SAFETY: a fat binary begins with a header of 16 bytes, which says how long it is.
    unsafe {
        if at.is_null() || at.cast::<u32>().read_unaligned() != FAT {
            return Err(Refused::Invalid("no fat binary where the wrapper points".to_owned()));
        }
        let header = usize::from(at.add(6).cast::<u16>().read_unaligned());
        let files = at.add(8).cast::<u64>().read_unaligned() as usize;
        Ok(std::slice::from_raw_parts(at, header + files))
    }
}

fn field<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at + N)?.try_into().ok()
}

/// The PTX with the highest compute capability that the device has.
pub fn fat_text(bytes: &[u8]) -> Result<String, Refused> {
    let damaged = || Refused::Invalid("a damaged fat binary".to_owned());
    let mut at = usize::from(u16::from_le_bytes(field(bytes, 6).ok_or_else(damaged)?));
    let mut best: Option<(u32, &[u8])> = None;
    while at + FILE_HEADER <= bytes.len() {
        let file = &bytes[at..];
        let kind = u16::from_le_bytes(field(file, 0).ok_or_else(damaged)?);
        let header = u32::from_le_bytes(field(file, 4).ok_or_else(damaged)?) as usize;
        let size = u64::from_le_bytes(field(file, 8).ok_or_else(damaged)?) as usize;
        let architecture = u32::from_le_bytes(field(file, 28).ok_or_else(damaged)?);
        let end = header
            .checked_add(size)
            .filter(|&end| header >= FILE_HEADER && end <= file.len())
            .ok_or_else(damaged)?;
        if kind == KIND_PTX
            && architecture <= ARCHITECTURE
            && best.is_none_or(|(other, _)| other < architecture)
        {
            best = Some((architecture, &file[..end]));
        }
        at += end;
    }
    let (_, file) = best.ok_or(Refused::NoBinary)?;
    let text = payload(file).ok_or_else(damaged)?;
    let text = String::from_utf8(text).map_err(|_| damaged())?;
    Ok(text.trim_end_matches('\0').to_owned())
}

fn payload(file: &[u8]) -> Option<Vec<u8>> {
    let header = u32::from_le_bytes(field(file, 4)?) as usize;
    let compressed = u32::from_le_bytes(field(file, 16)?) as usize;
    let flags = u64::from_le_bytes(field(file, 40)?);
    let size = u64::from_le_bytes(field(file, 56)?);
    if flags & (LZ4 | ZSTD) == 0 {
        return Some(file[header..].to_vec());
    }
    let bytes = file.get(header..header.checked_add(compressed)?)?;
    if size > LONGEST {
        return None;
    }
    if flags & LZ4 != 0 {
        return lz4_flex::block::decompress(bytes, size as usize).ok();
    }
    let mut text = Vec::new();
    ruzstd::decoding::StreamingDecoder::new(bytes).ok()?.take(LONGEST).read_to_end(&mut text).ok()?;
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A fat binary of one file, as nvcc writes it.
    fn fat(kind: u16, architecture: u32, flags: u64, payload: &[u8], size: usize) -> Vec<u8> {
        let mut file = vec![0u8; FILE_HEADER];
        file[0..2].copy_from_slice(&kind.to_le_bytes());
        file[4..8].copy_from_slice(&(FILE_HEADER as u32).to_le_bytes());
        file[8..16].copy_from_slice(&(payload.len() as u64).to_le_bytes());
        file[16..20].copy_from_slice(&(payload.len() as u32).to_le_bytes());
        file[28..32].copy_from_slice(&architecture.to_le_bytes());
        file[40..48].copy_from_slice(&flags.to_le_bytes());
        file[56..64].copy_from_slice(&(size as u64).to_le_bytes());
        file.extend_from_slice(payload);
        let mut out = FAT.to_le_bytes().to_vec();
        out.extend_from_slice(&1u16.to_le_bytes());
        out.extend_from_slice(&16u16.to_le_bytes());
        out.extend_from_slice(&(file.len() as u64).to_le_bytes());
        out.extend_from_slice(&file);
        out
    }

    const TEXT: &str = ".version 8.0 // a text that repeats: abcabcabcabcabcabcabcabcabc";

    #[test]
    fn ptx_comes_out_of_a_fat_binary_plain_or_compressed() {
        assert_eq!(fat_text(&fat(KIND_PTX, 80, 0, TEXT.as_bytes(), TEXT.len())), Ok(TEXT.to_owned()));
        let packed = lz4_flex::block::compress(TEXT.as_bytes());
        assert_eq!(fat_text(&fat(KIND_PTX, 80, LZ4, &packed, TEXT.len())), Ok(TEXT.to_owned()));
        let packed = ruzstd::encoding::compress_to_vec(
            TEXT.as_bytes(),
            ruzstd::encoding::CompressionLevel::Uncompressed,
        );
        assert_eq!(fat_text(&fat(KIND_PTX, 80, ZSTD, &packed, TEXT.len())), Ok(TEXT.to_owned()));
    }

    #[test]
    fn machine_code_and_ptx_for_newer_devices_are_no_binary_for_this_one() {
        assert_eq!(fat_text(&fat(2, 80, 0, b"elf", 3)), Err(Refused::NoBinary));
        assert_eq!(fat_text(&fat(KIND_PTX, 120, 0, b"ptx", 3)), Err(Refused::NoBinary));
        let elf = [&ELF.to_le_bytes()[..], &[0; 60]].concat();
        // SAFETY: an image of 64 bytes.
        assert_eq!(unsafe { texts(elf.as_ptr()) }, Err(Refused::NoBinary));
    }

    #[test]
    fn a_fat_binary_cut_at_any_byte_is_refused() {
        let whole = fat(KIND_PTX, 80, LZ4, &lz4_flex::block::compress(TEXT.as_bytes()), TEXT.len());
        for end in 8..whole.len() {
            assert!(fat_text(&whole[..end]).is_err(), "cut at {end}");
        }
    }

    #[test]
    fn linked_texts_are_found_again() {
        let both = [TEXT.to_owned(), ".target sm_80".to_owned()];
        // SAFETY: an image that `join` has made.
        assert_eq!(unsafe { texts(join(&both).as_ptr()) }, Ok(both.to_vec()));
    }
}
