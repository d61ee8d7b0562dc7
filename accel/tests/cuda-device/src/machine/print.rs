// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The device's printf: a format string of C and a buffer of arguments, each aligned to its size (CUDA C++ Programming Guide, formatted output).

/// What the format makes of the arguments. `argument` reads 4 or 8 bytes at an offset of the buffer, `text` a string at an address.
pub fn format(
    format: &[u8],
    argument: impl Fn(usize, usize) -> u64,
    text: impl Fn(u64) -> Vec<u8>,
) -> Vec<u8> {
    let (mut out, mut at, mut offset) = (Vec::new(), 0, 0usize);
    let mut next = |size: usize| {
        offset = offset.next_multiple_of(size);
        offset += size;
        argument(offset - size, size)
    };
    while at < format.len() {
        if format[at] != b'%' {
            out.push(format[at]);
            at += 1;
            continue;
        }
        let start = at;
        at += 1;
        let mut spec = String::from("%");
        while let Some(&byte) = format.get(at).filter(|byte| b"-+ #0123456789.*".contains(byte)) {
            if byte == b'*' {
                spec.push_str(&(next(4) as i32).to_string());
            } else {
                spec.push(char::from(byte));
            }
            at += 1;
        }
        let long = format[at..]
            .iter()
            .take_while(|byte| b"hlLqjzt".contains(byte))
            .map(|byte| if byte == &b'h' { 0 } else { 1 })
            .sum::<u32>()
            > 0;
        while format.get(at).is_some_and(|byte| b"hlLqjzt".contains(byte)) {
            at += 1;
        }
        let Some(&kind) = format.get(at) else {
            out.extend_from_slice(&format[start..]);
            break;
        };
        at += 1;
        match kind {
            b'%' => out.push(b'%'),
            b's' => {
                let value = text(next(8));
                out.extend(host(&spec, "s", Value::Text(value)));
            }
            b'd' | b'i' if !long => {
                out.extend(host(&spec, "lld", Value::Integer(next(4) as i32 as i64 as u64)))
            }
            b'd' | b'i' => out.extend(host(&spec, "lld", Value::Integer(next(8)))),
            b'u' | b'x' | b'X' | b'o' => out.extend(host(
                &spec,
                &format!("ll{}", char::from(kind)),
                Value::Integer(next(if long { 8 } else { 4 })),
            )),
            b'c' => out.extend(host(&spec, "c", Value::Integer(next(4)))),
            b'p' => out.extend(host(&spec, "p", Value::Integer(next(8)))),
            b'e' | b'E' | b'f' | b'F' | b'g' | b'G' | b'a' | b'A' => {
                out.extend(host(&spec, &char::from(kind).to_string(), Value::Real(f64::from_bits(next(8)))));
            }
            _ => out.extend_from_slice(&format[start..at]),
        }
    }
    out
}

enum Value {
    Integer(u64),
    Real(f64),
    Text(Vec<u8>),
}

/// One conversion by the host's snprintf.
fn host(spec: &str, kind: &str, value: Value) -> Vec<u8> {
    let Ok(format) = std::ffi::CString::new(format!("{spec}{kind}")) else { return Vec::new() };
    let mut buffer = vec![0u8; 256];
    loop {
        let (to, len) = (buffer.as_mut_ptr().cast::<libc::c_char>(), buffer.len());
        // SAFETY: the buffer has `len` bytes, and the format has one conversion, whose type is the value's: the caller pairs them.
        let written = unsafe {
            match &value {
                Value::Integer(value) => libc::snprintf(to, len, format.as_ptr(), *value),
                Value::Real(value) => libc::snprintf(to, len, format.as_ptr(), *value),
                Value::Text(text) => {
                    let text = std::ffi::CString::new(text.clone()).unwrap_or_default();
                    libc::snprintf(to, len, format.as_ptr(), text.as_ptr())
                }
            }
        };
        let Ok(written) = usize::try_from(written) else { return Vec::new() };
        if written < len {
            buffer.truncate(written);
            return buffer;
        }
        buffer.resize(written + 1, 0);
    }
}
