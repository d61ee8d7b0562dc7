// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Lines over a size, and spans of ratios, as SVG elements. Both axes of a chart are logarithmic.

use std::fmt::Write as _;

use super::escape;
use super::family::{Family, is_limit, label};
use crate::record::Better;
use crate::report::figure;

/// Width, height, and the plot's edges in them.
const SIZE: (f64, f64) = (440.0, 260.0);
const LEFT: f64 = 58.0;
const RIGHT: f64 = 428.0;
const TOP: f64 = 12.0;
const BOTTOM: f64 = 232.0;
/// Least distance of two labels on the horizontal axis, for the larger letters on a phone.
const LABEL: f64 = 46.0;

/// A logarithmic axis from `low` to `high`, drawn from `from` to `to`.
#[derive(Clone, Copy)]
struct Axis {
    low: f64,
    high: f64,
    from: f64,
    to: f64,
}

impl Axis {
    fn at(self, value: f64) -> f64 {
        let whole = (self.high / self.low).ln();
        if whole == 0.0 {
            return f64::midpoint(self.from, self.to);
        }
        self.from + (value / self.low).ln() / whole * (self.to - self.from)
    }

    /// 1, 2 and 5 times powers of ten within the axis; powers of ten alone on a long one, more of them on a short one.
    fn ticks(self) -> Vec<f64> {
        let decades = (self.high / self.low).log10();
        let steps: &[f64] = match decades {
            d if d > 2.5 => &[1.0],
            d if d > 0.8 => &[1.0, 2.0, 5.0],
            _ => &[1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0],
        };
        let first = self.low.log10().floor() as i32;
        let last = self.high.log10().ceil() as i32;
        (first..=last)
            .flat_map(|power| steps.iter().map(move |step| step * 10f64.powi(power)))
            .filter(|tick| (self.low..=self.high).contains(tick))
            .collect()
    }
}

fn bounds(values: impl Iterator<Item = f64>) -> (f64, f64) {
    values.fold((f64::INFINITY, 0.0), |(low, high), value| (low.min(value), high.max(value)))
}

/// A figure with a chart of the family, a line for each system, in the colour of its place among `systems`; those of `limit` are dashed.
pub fn lines(family: &Family, limit: Option<&Family>, systems: &[String]) -> String {
    let chart = Chart::new(family, limit, systems);
    let good = match family.better {
        Better::Higher => "more is better",
        Better::Lower => "less is better",
    };
    let title = format!("{}, {}: {good}", escape(&family.name), escape(&family.unit));
    let mut out = format!("<figure class=\"lines\"><figcaption>{title}</figcaption>\n<ul class=\"legend\">");
    for (system, _) in &chart.lines {
        let _ = write!(out, "<li class=\"{}\">{}</li>", chart.class(system), escape(system));
    }
    let _ = writeln!(
        out,
        "</ul>\n<svg viewBox=\"0 0 {} {}\" role=\"img\" aria-label=\"{title}\">",
        SIZE.0, SIZE.1
    );
    chart.grid(&mut out);
    chart.sizes(&mut out);
    for line in &chart.lines {
        chart.line(&mut out, line);
    }
    out.push_str("</svg></figure>");
    out
}

/// The lines of a family and of its limit on common axes.
struct Chart<'a> {
    /// Systems, each with its points.
    lines: Vec<&'a (String, Vec<(f64, f64)>)>,
    /// All systems: the same has the same colour in each chart.
    systems: &'a [String],
    unit: &'a str,
    x: Axis,
    y: Axis,
}

impl<'a> Chart<'a> {
    fn new(family: &'a Family, limit: Option<&'a Family>, systems: &'a [String]) -> Self {
        let limits = limit.into_iter().flat_map(|limit| &limit.lines);
        let lines: Vec<_> = family.lines.iter().chain(limits).collect();
        let points = || lines.iter().flat_map(|(_, points)| points);
        let (least, most) = bounds(points().map(|point| point.1));
        let (low, high) = bounds(points().map(|point| point.0));
        let x = Axis { low, high, from: LEFT + 8.0, to: RIGHT - 8.0 };
        let y = Axis { low: least / 1.3, high: most * 1.3, from: BOTTOM, to: TOP };
        Chart { lines, systems, unit: &family.unit, x, y }
    }

    /// A line's class: its colour, dashes for limits.
    fn class(&self, system: &str) -> String {
        let place = self.systems.iter().position(|name| name == system).unwrap_or(0);
        let limit = if is_limit(system) { " limit" } else { "" };
        format!("c{}{limit}", place % 8)
    }

    /// Draws the horizontal lines with their figures.
    fn grid(&self, out: &mut String) {
        for tick in self.y.ticks() {
            let at = self.y.at(tick);
            let _ = writeln!(
                out,
                "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{RIGHT}\" y1=\"{at:.1}\" y2=\"{at:.1}\"/>"
            );
            let text = short(tick);
            let _ = writeln!(
                out,
                "<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{text}</text>",
                LEFT - 6.0,
                at + 4.0
            );
        }
    }

    /// Writes the sizes below the plot, except those without room beside their neighbour.
    fn sizes(&self, out: &mut String) {
        let mut sizes: Vec<f64> =
            self.lines.iter().flat_map(|(_, points)| points).map(|point| point.0).collect();
        sizes.sort_by(f64::total_cmp);
        sizes.dedup();
        let mut free = 0.0;
        for size in sizes {
            let at = self.x.at(size);
            if at >= free {
                let text = label(size);
                let _ = writeln!(
                    out,
                    "<text x=\"{at:.1}\" y=\"{}\" text-anchor=\"middle\">{text}</text>",
                    BOTTOM + 18.0
                );
                free = at + LABEL;
            }
        }
    }

    /// Draws the line and the points of one system.
    fn line(&self, out: &mut String, (system, points): &(String, Vec<(f64, f64)>)) {
        let path: Vec<String> = points
            .iter()
            .map(|(size, value)| format!("{:.1},{:.1}", self.x.at(*size), self.y.at(*value)))
            .collect();
        let class = self.class(system);
        let _ = writeln!(out, "<polyline class=\"{class}\" points=\"{}\"/>", path.join(" "));
        for (size, value) in points {
            let _ = writeln!(
                out,
                "<circle class=\"{class}\" cx=\"{:.1}\" cy=\"{:.1}\" r=\"3\"><title>{} {}: {} {}</title></circle>",
                self.x.at(*size),
                self.y.at(*value),
                escape(system),
                label(*size),
                figure(*value),
                escape(self.unit)
            );
        }
    }
}

/// A round number, with k, M or G for thousands, millions and thousands of millions.
fn short(value: f64) -> String {
    let (scaled, unit) = match value {
        v if v >= 1e9 => (v / 1e9, "G"),
        v if v >= 1e6 => (v / 1e6, "M"),
        v if v >= 1e3 => (v / 1e3, "k"),
        v => (v, ""),
    };
    let text = format!("{scaled:.4}");
    format!("{}{unit}", text.trim_end_matches('0').trim_end_matches('.'))
}

/// A bar from the least to the most ratio, a tick at the median and a line at 1.
pub fn span((low, high): (f64, f64), least: f64, middle: f64, most: f64) -> String {
    let axis = Axis { low, high: high.max(low * 1.01), from: 4.0, to: 196.0 };
    format!(
        "<svg class=\"span\" viewBox=\"0 0 200 16\" aria-hidden=\"true\"><rect x=\"{0:.1}\" y=\"5\" width=\"{1:.1}\" height=\"6\"/>\
         <line class=\"one\" x1=\"{2:.1}\" x2=\"{2:.1}\" y1=\"0\" y2=\"16\"/>\
         <line class=\"median\" x1=\"{3:.1}\" x2=\"{3:.1}\" y1=\"2\" y2=\"14\"/></svg>",
        axis.at(least),
        (axis.at(most) - axis.at(least)).max(1.0),
        axis.at(1.0),
        axis.at(middle)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_axis_puts_equal_ratios_at_equal_distances() {
        let axis = Axis { low: 1.0, high: 100.0, from: 0.0, to: 200.0 };
        assert!((axis.at(10.0) - 100.0).abs() < 1e-9);
        assert_eq!(axis.ticks(), [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0]);
        let short = Axis { low: 1.9, high: 4.5, from: 0.0, to: 200.0 };
        assert_eq!(short.ticks(), [2.0, 3.0, 4.0]);
        let flat = Axis { low: 3.0, high: 3.0, from: 0.0, to: 10.0 };
        assert_eq!(flat.at(3.0), 5.0);
    }

    #[test]
    fn a_system_has_one_colour_in_all_charts() {
        let systems = ["tombolo", "ext4-dax", "9p"].map(str::to_owned);
        let family = |names: &[&str]| Family {
            name: "fio-read-*".into(),
            unit: "MB/s".into(),
            better: Better::Higher,
            lines: names.iter().map(|name| ((*name).to_owned(), vec![(4.0, 1.0), (8.0, 2.0)])).collect(),
        };
        for names in [&["tombolo", "ext4-dax", "9p"][..], &["tombolo", "9p"]] {
            let figure = lines(&family(names), None, &systems);
            assert!(figure.contains("<li class=\"c2\">9p</li>"), "{figure}");
        }
    }

    #[test]
    fn numbers_on_an_axis_are_short() {
        for (value, text) in [(5_000_000.0, "5M"), (200.0, "200"), (0.5, "0.5"), (1000.0, "1k"), (2e9, "2G")]
        {
            assert_eq!(short(value), text);
        }
    }
}
