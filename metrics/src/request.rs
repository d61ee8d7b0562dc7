// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Parses one HTTP request (RFC 9112) as far as this server needs it: its first line, and its end.

/// Bytes of the longest request.
pub const LONGEST: usize = 8 << 10;

/// A peer's request so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// Not complete.
    Part,
    /// For the metrics; with `body` the metrics themselves, without (HEAD) only their length.
    Figures {
        /// GET.
        body: bool,
    },
    /// For another path.
    Elsewhere,
    /// With another method than GET and HEAD.
    Method,
    /// Not HTTP, or too long.
    Broken,
}

/// Parses the bytes received so far.
#[must_use]
pub fn read(bytes: &[u8]) -> Request {
    let ends = |end: &[u8]| bytes.windows(end.len()).any(|w| w == end);
    if !ends(b"\r\n\r\n") && !ends(b"\n\n") {
        return if bytes.len() < LONGEST { Request::Part } else { Request::Broken };
    }
    let line = bytes.split(|b| *b == b'\n').next().unwrap_or_default();
    let Ok(line) = std::str::from_utf8(line) else { return Request::Broken };
    let mut words = line.split_ascii_whitespace();
    let (Some(method), Some(target), Some(version), None) =
        (words.next(), words.next(), words.next(), words.next())
    else {
        return Request::Broken;
    };
    if !version.starts_with("HTTP/1.") {
        return Request::Broken;
    }
    // The absolute form, as a proxy sends it: http://host/metrics.
    let target = match target.strip_prefix("http://") {
        Some(rest) => rest.find('/').map_or("/", |at| &rest[at..]),
        None => target,
    };
    let path = target.split('?').next().unwrap_or_default();
    match (method, path) {
        ("GET" | "HEAD", "/" | "/metrics") => Request::Figures { body: method == "GET" },
        ("GET" | "HEAD", _) => Request::Elsewhere,
        _ => Request::Method,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_whole_at_its_empty_line_wherever_it_was_cut() {
        let whole = b"GET /metrics?name[]=up HTTP/1.1\r\nHost: a\r\n\r\n";
        for cut in 0..whole.len() {
            assert_eq!(read(&whole[..cut]), Request::Part, "{cut}");
        }
        assert_eq!(read(whole), Request::Figures { body: true });
    }

    #[test]
    fn a_path_is_known_with_a_query_and_in_its_absolute_form() {
        let ask = |line: &str| read(format!("{line}\r\nHost: a\r\n\r\n").as_bytes());
        for line in [
            "GET / HTTP/1.0",
            "GET /metrics HTTP/1.1",
            "GET /?a=b HTTP/1.1",
            "GET http://h:1/metrics HTTP/1.1",
        ] {
            assert_eq!(ask(line), Request::Figures { body: true }, "{line}");
        }
        assert_eq!(ask("HEAD /metrics HTTP/1.1"), Request::Figures { body: false });
        assert_eq!(ask("GET /metricsx HTTP/1.1"), Request::Elsewhere);
        assert_eq!(ask("POST /metrics HTTP/1.1"), Request::Method);
        for line in
            ["", "GET", "GET /metrics", "GET /metrics HTTP/2", "GET /metrics HTTP/1.1 x", "\u{16}\u{3}\u{1}"]
        {
            assert_eq!(ask(line), Request::Broken, "{line}");
        }
    }

    #[test]
    fn a_request_without_end_is_broken_at_its_limit() {
        assert_eq!(read(&vec![b'a'; LONGEST - 1]), Request::Part);
        assert_eq!(read(&vec![b'a'; LONGEST]), Request::Broken);
    }
}
