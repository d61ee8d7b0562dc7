// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The collector's output: lines of words, read by `noise/src/recording.rs`. The last line is `end`, so that half of an output is never taken
//! for all of it.

use std::io::{self, BufRead, Write};

use crate::quanta::Record;
use crate::tracefs::Instance;

/// The first line.
pub fn head(out: &mut impl Write) -> io::Result<()> {
    writeln!(out, "tombolo-noise 1")
}

/// Something that is missing, for the user.
pub fn note(out: &mut impl Write, text: &str) -> io::Result<()> {
    writeln!(out, "note {}", text.replace('\n', " "))
}

/// The last line.
pub fn end(out: &mut impl Write) -> io::Result<()> {
    writeln!(out, "end")
}

/// A line as it is.
///
/// # Errors
/// It can't be written.
pub fn line(out: &mut impl Write, text: &str) -> Result<(), String> {
    writeln!(out, "{text}").map_err(|e| format!("the output can't be written: {e}"))
}

/// The measurements of one CPU.
///
/// # Errors
/// It can't be written.
pub fn record(out: &mut impl Write, record: &Record) -> Result<(), String> {
    let Record { cpu, thread, first, last, dropped, steal_ns, .. } = record;
    let smis = u8::from(record.smis_counted);
    line(out, &format!("cpu {cpu} {thread} {first} {last} {dropped} {steal_ns} {smis}"))?;
    for gap in &record.gaps {
        line(out, &format!("gap {} {} {}", gap.start, gap.end, gap.smis))?;
    }
    for (name, values) in [("work", &record.fixed_work), ("time", &record.fixed_time)] {
        for values in values.chunks(64) {
            let words: Vec<String> = values.iter().map(u32::to_string).collect();
            line(out, &format!("{name} {}", words.join(" ")))?;
        }
    }
    Ok(())
}

/// The recorded events, each line after a `|`.
///
/// # Errors
/// They can't be read or written.
pub fn trace(out: &mut impl Write, instance: &mut Instance) -> Result<(), String> {
    line(out, &format!("lost {}", instance.lost()))?;
    let mut text = instance.text()?;
    let mut buffer = Vec::new();
    let mut heading = true;
    loop {
        buffer.clear();
        let read =
            text.read_until(b'\n', &mut buffer).map_err(|e| format!("the trace can't be read: {e}"))?;
        if read == 0 {
            return Ok(());
        }
        // The table begins with comments. Below them a line may begin so too, where a thread's name has a line end.
        heading = heading && buffer.starts_with(b"#");
        if !heading {
            let written = out.write_all(b"|").and_then(|()| out.write_all(&buffer));
            written.map_err(|e| format!("the output can't be written: {e}"))?;
        }
    }
}
