// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The guest's requests: lines with the guest-physical addresses of request pages, answered in these pages.

use std::io::{self, BufRead, BufReader, Read};

use super::format::{
    TBP_DONE, TBP_FRAMES, TBP_HELLO, TBP_MAGIC, TBP_MAP, TBP_OFF, TBP_ON, TBP_REFUSED, TBP_VERSION, tbp_page,
};
use super::memory::Memory;

/// `TBP_NO_FRAME`, whose type bindgen does not know.
const NO_FRAME: u64 = u64::MAX;

/// The devices of the VM, as their numbers in requests count them.
pub trait Devices {
    /// The address of each in the guest: bus << 8 | device << 3 | function.
    ///
    /// # Errors
    /// QEMU does not tell them.
    fn functions(&mut self) -> anyhow::Result<Vec<u32>>;
    /// Lets a device's DMA go untranslated, or blocks it.
    ///
    /// # Errors
    /// There is no such device, or the module refuses.
    fn switch(&mut self, device: u32, on: bool) -> anyhow::Result<()>;
}

/// Answers requests until the port's other side is closed. What is refused is told to `refused`.
///
/// # Errors
/// The port can't be read.
pub fn serve(
    port: impl Read,
    memory: &Memory,
    devices: &mut impl Devices,
    mut refused: impl FnMut(&anyhow::Error),
) -> io::Result<()> {
    let mut port = BufReader::new(port);
    let mut line = Vec::new();
    loop {
        line.clear();
        // A guest that never ends a line fills no memory.
        if port.by_ref().take(64).read_until(b'\n', &mut line)? == 0 {
            return Ok(());
        }
        let address =
            std::str::from_utf8(&line).ok().and_then(|text| u64::from_str_radix(text.trim(), 16).ok());
        let Some(request) = address.and_then(|address| memory.request(address)) else { continue };
        let seen = request.read();
        // A guest of another version does not know that requests are taken up; it is only refused.
        if seen.magic != TBP_MAGIC || (u32::from(seen.version) == TBP_VERSION && !request.take()) {
            continue;
        }
        let page = request.read();
        let answer = answer(page, memory, devices).unwrap_or_else(|e| {
            refused(&e);
            tbp_page { status: TBP_REFUSED, ..page }
        });
        request.answer(&answer);
    }
}

fn answer(asked: tbp_page, memory: &Memory, devices: &mut impl Devices) -> anyhow::Result<tbp_page> {
    let mut page = tbp_page { status: TBP_DONE, ..asked };
    anyhow::ensure!(
        u32::from(asked.version) == TBP_VERSION,
        "the guest's module speaks version {} of the bypass, this program {TBP_VERSION}",
        asked.version
    );
    match u32::from(asked.operation) {
        TBP_HELLO => {
            let functions = devices.functions()?;
            page.page = memory.page();
            page.frames = memory.frames();
            page.highest = memory.highest();
            page.devices = u32::try_from(functions.len())?;
            for (place, function) in page.functions.iter_mut().zip(functions) {
                *place = function;
            }
        }
        TBP_MAP => {
            let left = memory.frames().saturating_sub(asked.first);
            anyhow::ensure!(left > 0, "the guest asks for page {} of its map", asked.first);
            page.count = TBP_FRAMES.min(u32::try_from(left).unwrap_or(TBP_FRAMES));
            for (frame, number) in page.frame.iter_mut().zip(asked.first..asked.first + u64::from(page.count))
            {
                *frame = memory.frame(number).unwrap_or(NO_FRAME);
            }
        }
        operation @ (TBP_ON | TBP_OFF) => devices.switch(asked.device, operation == TBP_ON)?,
        other => anyhow::bail!("the guest asks for the unknown operation {other}"),
    }
    Ok(page)
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::fs::FileExt;

    use super::super::format::{TBP_TAKEN, TBP_WITHDRAWN};
    use super::*;

    #[derive(Default)]
    struct Fake(Vec<(u32, bool)>);

    impl Devices for Fake {
        fn functions(&mut self) -> anyhow::Result<Vec<u32>> {
            Ok(vec![0x100, 0x208])
        }
        fn switch(&mut self, device: u32, on: bool) -> anyhow::Result<()> {
            anyhow::ensure!(device < 2, "no device {device}");
            self.0.push((device, on));
            Ok(())
        }
    }

    /// A guest of pages of 2 MiB at made-up places of the host, whose request lies at an address.
    fn ask(request: &tbp_page, line: &str, frames: u64) -> (tbp_page, Vec<(u32, bool)>, usize) {
        let mut file = tempfile::tempfile().unwrap();
        file.set_len(frames * (2 << 20)).unwrap();
        // SAFETY: a tbp_page is plain bytes without padding that matters here.
        let bytes = unsafe {
            std::slice::from_raw_parts((&raw const *request).cast::<u8>(), std::mem::size_of::<tbp_page>())
        };
        file.write_all_at(bytes, 0x20_1000).unwrap();
        file.flush().unwrap();
        let places: Vec<u64> = (0..frames).map(|n| (frames - n) << 30).collect();
        let memory = Memory::of_frames(2 << 20, file, &places);
        let (mut devices, mut refused) = (Fake::default(), 0);
        serve(line.as_bytes(), &memory, &mut devices, |_| refused += 1).unwrap();
        let answer = memory.request(0x20_1000).unwrap().read();
        (answer, devices.0, refused)
    }

    fn request(operation: u32) -> tbp_page {
        // SAFETY: zeroes are a tbp_page.
        let zero: tbp_page = unsafe { std::mem::zeroed() };
        let operation = u16::try_from(operation).unwrap();
        tbp_page { magic: TBP_MAGIC, version: u16::try_from(TBP_VERSION).unwrap(), operation, ..zero }
    }

    const LINE: &str = "0000000000201000\n";

    #[test]
    fn a_guest_learns_its_devices_and_its_map_in_parts() {
        let (hello, ..) = ask(&request(TBP_HELLO), LINE, 500);
        assert_eq!((hello.status, hello.page, hello.frames), (TBP_DONE, 2 << 20, 500));
        assert_eq!((hello.devices, hello.functions[0], hello.functions[1]), (2, 0x100, 0x208));
        assert_eq!(hello.highest, (500 << 30) + (2 << 20) - 1);
        let (part, ..) = ask(&tbp_page { first: 448, ..request(TBP_MAP) }, LINE, 500);
        assert_eq!((part.status, part.count, part.frame[0]), (TBP_DONE, 52, 52 << 30));
    }

    #[test]
    fn devices_are_switched_and_what_is_not_the_guests_is_refused() {
        let (on, switched, _) = ask(&tbp_page { device: 1, ..request(TBP_ON) }, LINE, 2);
        assert_eq!((on.status, switched), (TBP_DONE, vec![(1, true)]));
        let strange = [
            tbp_page { device: 2, ..request(TBP_ON) },
            tbp_page { first: 2, ..request(TBP_MAP) },
            tbp_page { first: u64::MAX, ..request(TBP_MAP) },
            tbp_page { version: 9, ..request(TBP_HELLO) },
            request(77),
        ];
        for asked in strange {
            let (answer, switched, refused) = ask(&asked, LINE, 2);
            assert_eq!((answer.status, switched.len(), refused), (TBP_REFUSED, 0, 1), "{asked:?}");
        }
    }

    #[test]
    fn a_request_that_the_guest_has_withdrawn_or_that_was_answered_is_not_carried_out() {
        for status in [TBP_WITHDRAWN, TBP_TAKEN, TBP_DONE, TBP_REFUSED] {
            let (page, switched, refused) = ask(&tbp_page { status, ..request(TBP_ON) }, LINE, 2);
            assert_eq!((page.status, switched.len(), refused), (status, 0, 0));
        }
        // A line that comes twice is one request.
        let (_, switched, _) = ask(&request(TBP_ON), &format!("{LINE}{LINE}"), 2);
        assert_eq!(switched, [(0, true)]);
    }

    #[test]
    fn addresses_outside_the_guests_memory_and_lines_that_are_none_are_passed_over() {
        for line in ["0000000000201008\n", "ffffffffffffffff\n", "\n", "x\n", "0000000000400000\n"] {
            let (page, switched, refused) = ask(&request(TBP_ON), line, 2);
            assert_eq!((page.status, switched.len(), refused), (0, 0, 0), "{line}");
        }
        let noise = format!("{}\n{LINE}", "7".repeat(1000));
        let (_, switched, _) = ask(&request(TBP_ON), &noise, 2);
        assert_eq!(switched, [(0, true)]);
    }
}
