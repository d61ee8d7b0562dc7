// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Prometheus' text format 0.0.4: families, each with a name, a kind and an explanation, and their samples.

use std::fmt::{Display, Write as _};

/// The kind of a family's values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Only grows, or begins again at zero.
    Counter,
    /// Goes up and down.
    Gauge,
}

impl Kind {
    fn word(self) -> &'static str {
        match self {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
        }
    }
}

/// A text that is being written.
#[derive(Clone, Debug, Default)]
pub struct Text {
    prefix: &'static str,
    out: String,
}

impl Text {
    /// An empty text; the names of all of its families begin with `prefix`.
    #[must_use]
    pub fn new(prefix: &'static str) -> Self {
        Self { prefix, out: String::new() }
    }

    /// Begins a family. All of its samples are written before the next family begins.
    pub fn family(&mut self, name: &'static str, kind: Kind, help: &str) -> Family<'_> {
        let full = format!("{}{name}", self.prefix);
        self.out += &format!("# HELP {full} {help}\n# TYPE {full} {}\n", kind.word());
        Family { name: full, out: &mut self.out }
    }

    /// Ends the page in Prometheus' text format, version 0.0.4.
    #[must_use]
    pub fn finish(self) -> String {
        self.out
    }
}

/// A family that is being written.
#[derive(Debug)]
pub struct Family<'a> {
    name: String,
    out: &'a mut String,
}

impl Family<'_> {
    /// Writes one sample. A label's value may hold any characters.
    pub fn sample(&mut self, labels: &[(&str, &str)], value: impl Display) {
        self.out.push_str(&self.name);
        for (n, (label, text)) in labels.iter().enumerate() {
            let opens = if n == 0 { '{' } else { ',' };
            // Writing to a string can't fail.
            let _infallible = write!(self.out, "{opens}{label}=\"{}\"", escaped(text));
        }
        let closes = if labels.is_empty() { "" } else { "}" };
        let _infallible = writeln!(self.out, "{closes} {value}");
    }
}

fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_family_has_one_head_and_a_line_for_each_sample() {
        let mut text = Text::new("tombolo_net_");
        let mut family = text.family("bytes_total", Kind::Counter, "Bytes of frames.");
        family.sample(&[("port", "a"), ("direction", "sent")], 7);
        family.sample(&[], 0.5);
        assert_eq!(
            text.finish(),
            "# HELP tombolo_net_bytes_total Bytes of frames.\n# TYPE tombolo_net_bytes_total counter\n\
             tombolo_net_bytes_total{port=\"a\",direction=\"sent\"} 7\ntombolo_net_bytes_total 0.5\n"
        );
    }

    #[test]
    fn a_name_that_a_client_chose_can_not_break_out_of_its_label() {
        let mut text = Text::new("x_");
        text.family("y", Kind::Gauge, "Z.").sample(&[("name", "a\"} 1\nb\\")], 1);
        assert!(text.finish().ends_with("\nx_y{name=\"a\\\"} 1\\nb\\\\\"} 1\n"));
    }
}
